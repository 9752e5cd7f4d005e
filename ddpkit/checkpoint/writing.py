"""A checkpoint that a thread writes while this rank goes on, and that is kept only if all agree."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from multiprocessing.util import Finalize

from ..process_group.failures import describe_error
from .files import NotWanted

_log = logging.getLogger(__name__)
_PAUSE = 1.0  # seconds between looks at the main thread, while nothing is decided


class Writing:
    """A thread that writes a checkpoint. The process does not end before it, unless it is killed.

    Args:
        step: The checkpoint's.
        write: Writes it. It gets this object, whose `check()` and `confirm()` it calls.
        is_awaited: Whether `save()` waits for it, and raises its error.
    """

    def __init__(self, step: int, write: Callable[[Writing], None], is_awaited: bool) -> None:
        self.step = step
        self.is_awaited = is_awaited
        self._write: Callable[[Writing], None] | None = write
        self._pid = os.getpid()
        self._decided = threading.Event()
        self._ended = threading.Event()
        self._ended.set()
        self._wanted = True
        self._process_ends = False
        self._error: BaseException | None = None
        # the interpreter waits for threads that are no daemons, but a child of multiprocessing lets
        # go of the folder before it does
        self._finalizer = Finalize(None, self._end_with_process, exitpriority=10)

    def start(self) -> None:
        """Begin to write."""
        thread = threading.Thread(target=self._run, name="ddpkit-checkpoint", daemon=False)
        self._ended.clear()
        try:
            thread.start()
        except Exception:
            self._finalizer.cancel()
            self._ended.set()
            raise

    def keep(self) -> None:
        """Let the checkpoint get its name when it is on the disk."""
        self._decided.set()

    def give_up(self) -> None:
        """Delete what was written, unless the checkpoint is complete; wait until that is done."""
        self._wanted = False
        self._decided.set()
        self.join()

    def check(self) -> None:
        """Raise NotWanted if the checkpoint was given up."""
        if not self._wanted:
            raise NotWanted

    def confirm(self) -> None:
        """Wait for the decision; raise NotWanted if the checkpoint was given up."""
        while not self._decided.wait(_PAUSE):
            if not threading.main_thread().is_alive():  # it was interrupted before it could decide
                raise NotWanted
        self.check()

    def is_ending(self) -> bool:
        """Return whether the process waits for this thread, to end."""
        return self._process_ends

    def is_running(self) -> bool:
        """Return whether there is still something to write; a forked child has no such thread."""
        return self._pid == os.getpid() and not self._ended.is_set()

    def join(self) -> None:
        """Wait until the checkpoint is complete, or its writing has failed."""
        if self.is_running():
            # not the thread's own join(), after whose interruption nobody waits for the thread
            self._ended.wait()

    def raise_error(self) -> None:
        """Raise what the thread has raised."""
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
        finally:
            del error  # whose traceback holds this frame, and the folder with it

    def _run(self) -> None:
        write, self._write = self._write, None  # lets go of the content at the end
        assert write is not None
        try:
            if not self.is_awaited:
                self.confirm()  # not beside the comparison, for which the step waits
            write(self)
        except NotWanted:
            pass
        except BaseException as error:
            self._error = error
            if not self.is_awaited:
                _log.error("Saving step %d without waiting failed: %s", self.step, describe_error(error))
        finally:
            del write  # and with it what holds the folder, before anybody goes on
            self._finalizer.cancel()
            self._ended.set()

    def _end_with_process(self) -> None:
        """Wait for the end, without a decision if there is none yet."""
        self._process_ends = True
        if not self._decided.is_set():
            self._wanted = False
        self._decided.set()
        self.join()
