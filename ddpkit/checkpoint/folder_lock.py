"""Lock folders: one job at a time writes into a folder, and a second one gets an error that names it.

The kernel holds such a lock for this process and drops it when the process ends, however it ends,
so none can be left behind on this machine. Some shared file systems lock within one machine only,
so the file that is locked also says which job holds it.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
import tempfile
import weakref
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from .lock_holder import describe_this_job, is_running, name_job
from .writing import Writing

_NAME = ".writer"
_FRESH = 300.0  # seconds since its last save in which a job on another machine counts as running
_TAKEN = (errno.EACCES, errno.EAGAIN)  # where another process holds the lock
_LENGTH = 10_000  # bytes of a lock's file that are read
_ADVICE = "Two jobs would mix their checkpoints: give each a folder of its own."
_locks: weakref.WeakValueDictionary[str, FolderLock] = weakref.WeakValueDictionary()


def lock_folder(folder: Path) -> FolderLock:
    """Lock a folder for this process as long as the result lives; later calls return the same lock.

    Raises:
        CheckpointError: If another job writes there; the message names it.
        OSError: If the folder cannot be written.
    """
    key = os.path.realpath(folder)
    lock = _locks.get(key)
    if lock is None or lock.pid != os.getpid():  # a forked child holds none
        lock = FolderLock(folder)
        _locks[key] = lock
    lock.renew()
    return lock


def wait_for_writing(folder: Path) -> None:
    """Wait until this process writes no checkpoint into a folder any more."""
    lock = _locks.get(os.path.realpath(folder))
    if lock is not None and lock.writing is not None:
        lock.writing.join()


class FolderLock:
    """A folder that this process may write into.

    Attributes:
        pid: The process that made it.
        writers: The objects of this process that write into the folder.
        writing: The checkpoint that is being written, or was the last.
    """

    def __init__(self, folder: Path) -> None:
        self.pid = os.getpid()
        self.writers: weakref.WeakSet[Any] = weakref.WeakSet()
        self.writing: Writing | None = None
        self._folder = folder
        self._path = folder / _NAME
        self._me = describe_this_job()
        self._file = -1
        self._release: Finalize | None = None

    def renew(self) -> None:
        """Take the lock, or show that it is still in use; raise if it is another job's."""
        if self._file < 0 or not _is_open(self._path, self._file):
            self._take()  # it was not yet taken, or somebody deleted the file
            return
        holder = _read(self._file)
        if holder != self._me:
            raise CheckpointError(
                f"{name_job(holder)} has begun to write into {self._folder}. {_ADVICE}",
            )
        os.utime(self._file)

    def _take(self) -> None:
        file = _open_and_lock(self._path)
        if file < 0:
            job = name_job(_read_path(self._path))
            raise CheckpointError(f"{job} is writing into {self._folder}. {_ADVICE}")
        holder = _read(file)
        if self._may_live(holder, file):
            os.close(file)
            raise CheckpointError(
                f"{name_job(holder)} has written into {self._folder} within the last "
                f"{_FRESH / 60:g} minutes. {_ADVICE} If it has ended, delete {self._path}."
            )
        if os.fstat(file).st_nlink > 1:  # a backup has it, too, or it is somebody's: it stays as it is
            os.unlink(self._path)
            os.close(file)
            return self._take()
        os.ftruncate(file, 0)
        os.pwrite(file, json.dumps(self._me).encode(), 0)
        if self._release is not None:  # of a file that somebody has deleted
            self._release()
        self._file = file
        self._release = Finalize(self, _release, (self._path, file, self._me), exitpriority=0)

    def _may_live(self, holder: Mapping[str, Any], file: int) -> bool:
        """Return whether a holder may still run, although this process got the lock.

        That happens where locks do not reach from machine to machine, and where a process has
        closed any other descriptor of the file, by which it loses the lock.
        """
        if not holder or holder == self._me:
            return False
        if holder.get("machine") == self._me["machine"]:
            return holder.get("pid") != self._me["pid"] and is_running(holder)
        if self._me["job"] and holder.get("job") == self._me["job"]:  # this job, started again
            return False
        return self._age(file) < _FRESH

    def _age(self, file: int) -> float:
        """Return the seconds since a file changed, by the clock of the file system."""
        with tempfile.TemporaryFile(dir=self._folder) as new:
            now = os.fstat(new.fileno()).st_mtime
        return now - os.fstat(file).st_mtime


def _open_and_lock(path: Path) -> int:
    """Open a file and lock it for this process.

    Returns:
        Its descriptor, not locked where the file system has no locks; -1 if another process holds
        the lock.

    Raises:
        CheckpointError: If it is a symbolic link or no file: what is behind it would be overwritten.
    """
    while True:
        file = _open(path, os.O_RDWR | os.O_CREAT)
        if not _try_to_lock(file):
            os.close(file)
            return -1
        if _is_open(path, file):
            return file
        os.close(file)  # its former holder deleted it meanwhile


def _open(path: Path, flags: int) -> int:
    """Open a lock's file, and nothing that somebody has put in its place."""
    try:
        file = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EMLINK, errno.ENXIO):  # of a link, of one on BSD, of a socket
            raise
    else:
        if stat.S_ISREG(os.fstat(file).st_mode):
            return file
        os.close(file)
    raise CheckpointError(f"{path} is a link or no file, so no Checkpointer made it. Delete it.")


def _try_to_lock(file: int) -> bool:
    """Lock a file, where the system can; return False if another process holds the lock."""
    try:
        # not shared with forked workers, as flock's is
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in _TAKEN
    return True


def _is_open(path: Path, file: int) -> bool:
    """Return whether a descriptor is of the file that has this path now."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(file))
    except OSError:
        return False


def _release(path: Path, file: int, me: Mapping[str, Any]) -> None:
    with suppress(OSError):
        if _is_open(path, file) and _read(file) == me:
            os.unlink(path)  # before the lock goes
    with suppress(OSError):
        os.close(file)


def _read(file: int) -> dict[str, Any]:
    """Return a lock's description of its holder; {} if there is none that can be read."""
    try:
        holder = json.loads(os.pread(file, _LENGTH, 0))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(holder, dict):
        return {}
    return holder


def _read_path(path: Path) -> dict[str, Any]:
    try:
        file = _open(path, os.O_RDONLY)
    except (CheckpointError, OSError):
        return {}
    try:
        return _read(file)
    finally:
        os.close(file)
