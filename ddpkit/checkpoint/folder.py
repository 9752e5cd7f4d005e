"""The checkpoints in a folder: their names and order, the list `latest`, pruning, and locking.

The text file `latest` lists what a `Checkpointer` wrote here, the last written first, with scores. Nothing else is
ever deleted.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import math
import os
import re
import shutil
import socket
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, describe_error, message_of, printable
from .files import Check, open_file, starts, write_durably

Scores = dict[str, float | None]  # by a checkpoint's name, the last written first

_log = logging.getLogger(__name__)
_LIST = "latest"
_LIST_LENGTH = 1 << 24  # bytes
_CHECKPOINT = re.compile(r"step-(\d{9,})\.pt")
_PIECES = re.compile(r"(step-\d{9,})\.[0-9a-f]{16}")  # folder with the pieces of sharded tensors
_LEFT_OVER = re.compile(rf"({_CHECKPOINT.pattern}|{_LIST})\.tmp")  # of a killed writer


def name_of(step: int) -> str:
    """Return the name of a step's checkpoint."""
    return f"step-{step:09d}.pt"


def step_of(name: str) -> int:
    """Return the step from a checkpoint's name."""
    return int(name[len("step-") : -len(".pt")])


def find_checkpoints(folder: Path) -> list[str]:
    """List the checkpoints' names, the last written first; then those not in `latest`, the greatest step first.

    Raises:
        CheckpointError: If `latest` exists and cannot be read.
    """
    listed = list(_scores_in(folder))  # before the files: another job may write one and list it
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    others = [name for name in names if name not in listed and _is_checkpoint(folder, name)]
    return listed + sorted(others, key=step_of, reverse=True)


def find_best(folder: Path) -> list[str]:
    """List the names in `latest` that have a score, the greatest first, NaN last; raise like `find_checkpoints()`."""
    return _rank_by_score(_scores_in(folder))


def _scores_in(folder: Path) -> Scores:
    try:
        return _read_list(folder)
    except OSError as error:
        remedy = "Delete it: load_latest() then loads the greatest step."
        raise CheckpointError(f"Cannot read the list of checkpoints: {error}. {remedy}") from error


def _read_list(folder: Path) -> Scores:
    """Read `latest`, without names of missing files; {} if there is none. Raise OSError if it cannot be read."""
    path = folder / _LIST
    listed: Scores = {}
    with suppress(FileNotFoundError), open_file(path) as file:
        text = file.read(_LIST_LENGTH + 1)
        if len(text) > _LIST_LENGTH:
            raise OSError(errno.EFBIG, f"It has more than {_LIST_LENGTH} bytes", str(path))
        for line in text.decode(errors="replace").splitlines():
            name, _, score = line.partition(" ")
            if not _is_checkpoint(folder, name):
                continue
            listed.setdefault(name, None)
            with suppress(ValueError):
                listed[name] = float(score)
    return listed


def list_and_prune(path: Path, score: float | None, keep: int, keep_best: int, pieces: str = "") -> None:
    """List a new checkpoint in `latest`, and delete listed ones that are no longer kept.

    Args:
        path: The checkpoint, complete.
        score: Its quality, if known.
        keep: Number of checkpoints to keep, the last written ones.
        keep_best: Number of checkpoints with the greatest score to keep in addition.
        pieces: Name of the folder of its pieces, if it has one.

    Raises:
        CheckpointError: If `latest` cannot be read or written; then nothing is deleted.
    """
    folder = path.parent
    try:
        listed: Scores = {path.name: score, **_read_list(folder)}
        listed[path.name] = score  # not that of a former file
        last = list(listed)[:keep]
        best = _rank_by_score(listed)[:keep_best]
        kept = [name for name in listed if name in last or name in best]
        lines = [name if listed[name] is None else f"{name} {listed[name]!r}" for name in kept]
        text = "".join(f"{line}\n" for line in lines)
        write_durably(folder / _LIST, lambda file: file.write(text.encode()))
    except OSError as error:
        raise CheckpointError(
            f"Saved {path}, which is complete, but cannot list it in {folder / _LIST}: {error}. "
            "load_latest() and load_best() may therefore load another checkpoint; load(path) loads this "
            "one. No older one was deleted."
        ) from error
    for name in listed.keys() - kept:
        try:
            (folder / name).unlink(missing_ok=True)
        except OSError as error:
            _log.warning("Saved %s, but could not delete an old checkpoint: %s.", path, error)
    delete_left_overs(folder, of=path.stem, used=pieces)


def delete_left_overs(folder: Path, of: str = "", used: str = "") -> None:
    """Delete files of killed writers, and folders of pieces that no checkpoint uses.

    Args:
        folder: The folder of the checkpoints.
        of: Name, without suffix, of a checkpoint that uses `used` alone. For other checkpoints only
            their existence counts.
        used: Name of the used folder.
    """
    for name in os.listdir(folder):
        if _LEFT_OVER.fullmatch(name):
            with suppress(OSError):
                os.unlink(folder / name)
        match = _PIECES.fullmatch(name)
        if match is None or name == used:
            continue
        if match[1] == of or not (folder / f"{match[1]}.pt").is_file():
            shutil.rmtree(folder / name, ignore_errors=True)


def is_folder_of(path: Path, name: str) -> bool:
    """Return whether this name is that of a folder for the pieces of a checkpoint."""
    match = _PIECES.fullmatch(name)
    return match is not None and match[1] == path.stem


def _is_checkpoint(folder: Path, name: str) -> bool:
    return _CHECKPOINT.fullmatch(name) is not None and (folder / name).is_file()


def _rank_by_score(scores: Scores) -> list[str]:
    """List the names with a score, the greatest first, equal ones in order, NaN last."""
    known = {name: (not math.isnan(score), score) for name, score in scores.items() if score is not None}
    return sorted(known, key=known.__getitem__, reverse=True)


# Locks: one job at a time writes into a folder, and a second one gets an error that names the first.
#
# The kernel releases the lock when the process ends. Some shared file systems lock within one machine only; there the
# first job notices the second one at its next save.

_LOCK_FILE = ".writer"
_LENGTH = 1000  # bytes of the lock file that are read
_locks: weakref.WeakValueDictionary[str, FolderLock] = weakref.WeakValueDictionary()


def lock_folder(folder: Path) -> FolderLock:
    """Lock a folder for this process as long as the result exists; later calls return the same lock.

    Raises:
        CheckpointError: If another job writes there; the message names it.
        OSError: If the folder cannot be written.
    """
    key = os.path.realpath(folder)
    lock = _locks.get(key)
    if lock is None or lock.pid != os.getpid():  # a forked child does not hold it
        lock = FolderLock(folder)
        _locks[key] = lock
    lock.check()
    return lock


def finish_writing(folder: Path, writing: Writing | None) -> str:
    """Wait until this process writes no checkpoint into a folder; return the error of the last one."""
    lock = _locks.get(os.path.realpath(folder))
    if lock is not None and lock.writing is not None:
        lock.writing.wait()
    return "" if writing is None else writing.wait()


class FolderLock:
    """A folder locked for this process; the lock file describes the process.

    Attributes:
        pid: The process that created it.
        writers: Objects of this process that write into the folder.
        writing: The checkpoint being written, or the last one.
    """

    def __init__(self, folder: Path) -> None:
        self.pid = os.getpid()
        self.writers: weakref.WeakSet[Any] = weakref.WeakSet()
        self.writing: Writing | None = None
        self._folder = folder
        self._me = f"process {self.pid} on {socket.gethostname()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}"
        file = open_file(folder / _LOCK_FILE, "a+b")
        self._file = file.fileno()
        weakref.finalize(self, file.close)
        try:
            # unlike flock's, not shared with forked workers
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:  # other errors mean that this file system has no locks
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise self._refusal("is writing into") from None
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, self._me.encode(), 0)

    def check(self) -> None:
        """Raise if another job has taken the lock on a file system that locks within one machine only."""
        if self._holder() != self._me:
            raise self._refusal("has begun to write into")

    def _holder(self) -> str:
        return printable(os.pread(self._file, _LENGTH, 0).decode(errors="replace"))

    def _refusal(self, does: str) -> CheckpointError:
        """Create the error that names the job holding the folder."""
        remedy = "Two jobs would mix their checkpoints: give each its own folder."
        return CheckpointError(f"Another job ({self._holder()}) {does} {self._folder}. {remedy}")


class Writing:
    """A checkpoint written by a thread. The process does not exit before it is complete, unless it is killed.

    Args:
        doing: Start of an error's message.
        is_shared: Whether each rank has a thread; otherwise rank 0 alone.

    Attributes:
        problem: The error, after the end; "" if there was none.
    """

    def __init__(self, doing: str, is_shared: bool) -> None:
        self.problem = ""
        self.is_shared = is_shared
        self._doing = doing
        self._pid = os.getpid()  # a forked child does not have the thread
        self._is_cancelled = False
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()

    def start(self, write: Callable[[Check], None]) -> None:
        """Write this rank's part by this function, which receives one that raises if it must stop."""
        self._thread = threading.Thread(target=self._run, args=(write,), name="ddpkit-checkpoint", daemon=False)
        if not starts(self._thread):
            self._run(write)

    def cancel(self) -> None:
        """Stop writing, because nobody waits any more and the states may change."""
        self._is_cancelled = True

    def wait(self) -> str:
        """Wait for the thread; return its error, "" if there was none."""
        has_begun = self._thread is not None and self._thread.ident is not None  # else the start was interrupted
        if has_begun and self._pid == os.getpid():
            # not the thread's own join(): if that is interrupted, nobody waits for the thread
            self._ended.wait()
        return self.problem

    def _run(self, write: Callable[[Check], None]) -> None:
        try:
            write(self._check)
        except Exception as error:
            self.problem = f"{self._doing}{explain(error)}"
            if self._doing:  # nobody may be waiting for it
                _log.error("%s", self.problem)
        finally:
            self._ended.set()

    def _check(self) -> None:
        if self._is_cancelled:
            raise CheckpointError("Not saved: the wait for the checkpoint was interrupted.")


def explain(error: Exception, doing: str = "") -> str:
    """Describe an error; `doing` precedes it unless it is a CheckpointError."""
    if isinstance(error, CheckpointError):
        return message_of(error)
    return f"{doing}{describe_error(error)}"
