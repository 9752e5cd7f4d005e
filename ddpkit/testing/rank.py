"""Be a warm rank: wait for tasks, run them under a pytest of its own, and clean up after each."""

from __future__ import annotations

import gc
import os
import queue
import sys
import threading
import traceback
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ..errors import DdpkitError, PeerError
from ..job import lifecycle
from ..signals import put_back_unused
from ..spawning.pickling import call_and_reply
from ..spawning.rank_process import forget_start_method, replace_environment, write_stack_on_request
from ..watch import monitor, stop_agreement
from . import cleaning
from .items import Items, raise_failure_of_peer
from .messages import Debugging, Done, Leftovers, RunOptions, RunTest, Started, Task


def main(
    connection: Connection,
    options: RunOptions,
    streams: list[int | None],
    env: dict[str, str],
    rank: int,
    stack_file: str,
) -> None:
    """Be a rank until the test process says that it is over, or has gone."""
    replace_environment(env)
    os.environ.pop("PYTEST_ADDOPTS", None)
    forget_start_method()
    _take_streams(streams)
    gc.freeze()  # pytest collects garbage again and again, but not torch's modules
    with open(stack_file, "w") as file:
        write_stack_on_request(file)
        coverage = _start_coverage(options.coverage)
        arguments = [*options.arguments, f"--basetemp={options.basetemp}-{os.getpid()}"]
        code = pytest.main(arguments, plugins=[RankPlugin(connection, options, rank)])
        if coverage is not None:
            coverage.stop()
            coverage.save()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(int(code))  # without waiting for threads that a test may have left


class RankPlugin:
    """Make a rank's pytest run the tasks that arrive, instead of collecting tests itself."""

    def __init__(self, connection: Connection, options: RunOptions, rank: int) -> None:
        self._connection = connection
        self._options = options
        self._rank = rank
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._store_port: str | None = None  # of the store where the group that is kept was made
        self._group: object = None
        self._capture: Any = None
        self._originals = cleaning.Originals(Path())

    @pytest.hookimpl(tryfirst=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        """Take over the test process's options, and tell other plugins that this run is a part."""
        vars(config.option).update(self._options.options)
        config.__dict__["workerinput"] = {
            **self._options.options,
            "workerid": f"rank{self._rank}",
            "workercount": 1,
            "testrunuid": "ranks",
            "mainargv": sys.argv,
            "ddpkit_rank": self._rank,
        }

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self) -> bool:
        """Collect nothing yet."""
        return True

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run the tasks that arrive, until nothing more comes."""
        self._capture = session.config.pluginmanager.getplugin("capturemanager")
        items = Items(session, self.borrow_terminal, self.return_terminal, self._send)
        session.config.pluginmanager.register(items, "ddpkit items")
        cleaning.remember()
        self._originals = cleaning.Originals(session.config.rootpath)
        threading.Thread(target=self._listen, name="ddpkit testing", daemon=True).start()
        group_is_whole = False
        try:
            group_is_whole = self._run_tasks(items)
        except PeerError:
            # a rank died between tests or after its part of one; the test process replaces all
            lifecycle.teardown()
        with suppress(PeerError):
            items.finalise(group_is_whole)
        lifecycle.teardown()
        return True

    def pytest_enter_pdb(self) -> None:
        """Wait for the terminal."""
        self.borrow_terminal()

    def pytest_leave_pdb(self) -> None:
        """Give the terminal back."""
        self.return_terminal()

    def borrow_terminal(self) -> None:
        """Wait until no other rank's debugger has the terminal."""
        self._send(Debugging(True))
        while not isinstance(self._inbox.get(), Debugging):
            pass

    def return_terminal(self) -> None:
        """Let another rank's debugger have the terminal."""
        self._send(Debugging(False))

    def _run_tasks(self, items: Items) -> bool:
        """Run tasks, and return true if the ranks are still as they were before the last one."""
        unharmed = True
        while True:
            task = self._wait()
            if task is None:
                return unharmed
            before = self._run(task, items)
            if before is None:
                lifecycle.teardown()  # the process will not be used again
                unharmed = False
            elif self._wait() is not None:  # all ranks have done it
                leftovers = self._leftovers(task, before)
                unharmed = not leftovers.traces
                self._send(leftovers)
            else:
                return False

    def _wait(self) -> Any:
        """Wait for the test process, without log records: nobody asks about ranks that wait.

        Returns:
            A `Task`; a `CleanUp` after one that this rank has done; None when all is over.
        """
        logger = monitor.log
        logger.disabled = True
        try:
            return self._inbox.get()
        finally:
            logger.disabled = False

    def _run(self, task: Task, items: Items) -> cleaning.Traces | None:
        """Run a task and send its outcome; return the state before it, None if it failed."""
        try:
            self._prepare(task)
            before = cleaning.traces()
            done = self._do(task, items)
        except PeerError as error:  # between the parts of the test in which it would be reported
            # sent from here, where it is being handled and so is not raised again
            self._send(Done(True, f"PeerError: {error}", heard_of=error.rank))
            return None
        except Exception:  # it cannot join, for example
            self._send(Done(True, traceback.format_exc()))
            return None
        self._send(done)
        return None if done.failed else before

    def _prepare(self, task: Task) -> None:
        """Give the task its environment, and join or leave the group as it asks."""
        os.chdir(task.folder)
        sys.path[:] = task.path
        replace_environment(task.environment)
        port = os.environ["MASTER_PORT"] if task.join else None
        if self._store_port != port:
            lifecycle.teardown()
            self._store_port = None
        cleaning.reset()
        if task.join and self._store_port is None:
            lifecycle.setup(timeout=timedelta(seconds=task.timeout))
            self._store_port = port
        self._group = dist.group.WORLD

    def _do(self, task: Task, items: Items) -> Done:
        if isinstance(task.work, RunTest):
            return items.run(task.work, self._begin)
        self._capture.resume_global_capture()
        reply = call_and_reply(task.work.pickled, self._begin, may_exit=False)
        self._capture.suspend_global_capture()
        output = "".join(self._capture.read_global_capture())
        return Done(reply.failed, reply, output)

    def _begin(self) -> None:
        """Note that the test's own code begins."""
        self._originals.learn()  # now that the test's modules have been imported
        self._send(Started())

    def _leftovers(self, task: Task, before: cleaning.Traces) -> Leftovers:
        """Leave the group if the task has or has stopped it, and describe all that the task has left behind."""
        joined = self._group is not None and dist.group.WORLD is self._group
        joined = joined and not stop_agreement.current().is_begun
        put_back_unused()  # they stay where the ranks have stopped
        found = before.compare(cleaning.traces()) + self._originals.replaced()
        if task.join and joined:
            found += _try_group()
        if not joined:
            lifecycle.teardown()
            self._store_port = None
        return Leftovers(joined, found)

    def _send(self, message: object) -> None:
        self._connection.send(message)

    def _listen(self) -> None:
        try:
            while True:
                self._inbox.put(self._connection.recv())
        except (EOFError, OSError):  # the test process has gone
            os._exit(1)


def _try_group() -> list[str]:
    """Do a step together, which fails or hangs if the ranks are not together in their group."""
    number = torch.ones(1)
    try:
        raise_failure_of_peer()
        dist.all_reduce(number)
    except DdpkitError:
        return ["a failure in the group"]
    except RuntimeError:
        return ["ranks that are not together"]
    if number.item() != dist.get_world_size():
        return ["collectives that do not fit together"]
    return []


def _take_streams(streams: list[int | None]) -> None:
    """Take the test process's own streams, in place of those of the process that forked this."""
    for number, stream in enumerate(streams):
        if stream is None:
            stream = os.open(os.devnull, os.O_RDWR)
        os.dup2(stream, number)
        os.close(stream)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", closefd=False, buffering=1)


def _start_coverage(settings: dict[str, Any] | None) -> Any:
    if settings is None:
        return None
    import coverage

    if coverage.Coverage.current() is not None:  # coverage looks after processes itself
        return None
    running = coverage.Coverage(data_suffix=True, **settings)
    running.start()
    return running
