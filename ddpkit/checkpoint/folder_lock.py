"""Claims on a folder: one job at a time writes into it, and a second one is told who does.

A claim is a lock that the kernel holds for this process and drops when it ends, however it ends, so none can be left
behind on this machine. Some shared file systems lock within one machine only, so the file also says who holds it.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import tempfile
import time
import weakref
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from ..launch.process_tree import born

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_NAME = ".writer"
_FRESH = 300.0  # seconds since its last save in which a job on another machine counts as running
_LOCKED = (errno.EACCES, errno.EAGAIN)
# what stays the same when a job is started again, maybe on another machine
_JOBS = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_STEP_ID", "PBS_JOBID", "LSB_JOBID", "LSB_JOBINDEX")
_claims: weakref.WeakValueDictionary[str, Claim] = weakref.WeakValueDictionary()


def claim(folder: Path) -> Claim:
    """Claim a folder for this process as long as the result lives; a second call in this process returns the same.

    Raises:
        CheckpointError: If another job writes there; the message names it.
        OSError: If the folder cannot be written.
    """
    key = os.path.realpath(folder)
    held = _claims.get(key)
    if held is None or held.pid != os.getpid():  # a forked child holds none
        _claims[key] = held = Claim(folder)
    held.renew()
    return held


class Claim:
    """A folder that this process may write into."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / _NAME
        self.pid = os.getpid()
        self.savers: weakref.WeakSet[Any] = weakref.WeakSet()  # objects of this process that write into it
        self.me = _describe_this_job()
        self.file = -1
        self._release: Finalize | None = None

    def renew(self) -> None:
        """Take the claim, or show that it is still in use; raise if it is another job's."""
        if self.file < 0 or not _is_open(self.path, self.file):  # not yet claimed, or somebody deleted the file
            self._take()
            return
        if _read(self.file) != self.me:
            raise CheckpointError(f"{_name(_read(self.file))} has begun to write into {self.folder}. {_ADVICE}")
        os.utime(self.path)

    def _take(self) -> None:
        file = _open_and_lock(self.path)
        if file < 0:
            raise CheckpointError(f"{_name(_read_path(self.path))} is writing into {self.folder}. {_ADVICE}")
        holder = _read(file)
        if holder and holder != self.me and self._may_live(holder, file):
            os.close(file)
            raise CheckpointError(
                f"{_name(holder)} has written into {self.folder} within the last {_FRESH / 60:g} minutes. "
                f"{_ADVICE} If it has ended, delete {self.path}."
            )
        os.lseek(file, 0, os.SEEK_SET)
        os.ftruncate(file, 0)
        os.write(file, json.dumps(self.me).encode())
        if self._release is not None:
            self._release()
        self.file = file
        self._release = Finalize(self, _let_go, (self.path, file, self.me), exitpriority=0)

    def _may_live(self, holder: Mapping[str, Any], file: int) -> bool:
        """Whether a holder may still run although this process got the lock: where locks do not reach it."""
        if holder.get("machine") == self.me["machine"]:
            # the lock alone does not tell: a process loses it when it closes any other descriptor of the file
            return holder.get("pid") != self.me["pid"] and _runs(holder.get("pid"), holder.get("born"))
        if self.me["job"] and holder.get("job") == self.me["job"]:  # this job, started again
            return False
        with tempfile.TemporaryFile(dir=self.folder) as probe:  # its time is the file system's, as the claim's is
            return os.fstat(probe.fileno()).st_mtime - os.fstat(file).st_mtime < _FRESH


_ADVICE = "Two jobs would mix their checkpoints: give each a folder of its own."


def _open_and_lock(path: Path) -> int:
    """Open a file and lock it for this process.

    Returns:
        Its descriptor, not locked where the file system has no locks; -1 if another process holds the lock.
    """
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o666)
        try:
            if fcntl is not None:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # not shared with forked workers, as flock's is
        except OSError as error:
            if error.errno in _LOCKED:
                os.close(file)
                return -1
        if _is_open(path, file):
            return file
        os.close(file)  # its former holder deleted it meanwhile


def _is_open(path: Path, file: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(file))
    except OSError:
        return False


def _let_go(path: Path, file: int, me: Mapping[str, Any]) -> None:
    with suppress(OSError):
        if _is_open(path, file) and _read(file) == me:
            os.unlink(path)  # before the lock goes
    with suppress(OSError):
        os.close(file)


def _read(file: int) -> dict[str, Any]:
    """Return what a claim says of its holder; {} if nothing that can be read."""
    try:
        os.lseek(file, 0, os.SEEK_SET)
        holder = json.loads(os.read(file, 10_000))
    except (OSError, ValueError, RecursionError):
        return {}
    return holder if isinstance(holder, dict) else {}


def _read_path(path: Path) -> dict[str, Any]:
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError:
        return {}
    try:
        return _read(file)
    finally:
        os.close(file)


def _name(holder: Mapping[str, Any]) -> str:
    if not holder:
        return "Another job"
    return f"Another job (process {holder.get('pid')} on {holder.get('host')}, since {holder.get('since')})"


def _describe_this_job() -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "machine": _machine(),
        "pid": os.getpid(),
        "born": born(os.getpid()),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
        "job": _job(os.environ),
        "token": os.urandom(8).hex(),
    }


def _job(env: Mapping[str, str]) -> str:
    """Return what names this job also after a restart; "" if nothing does."""
    names = [name for name in _JOBS if env.get(name, "none") not in ("", "none")]  # torchrun's default is none
    return " ".join(f"{name}={env[name]}" for name in names)


def _machine() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return socket.gethostname()


def _runs(pid: Any, birth: object) -> bool:
    """Tell whether a process runs that a claim on this machine names, by its number and by when it started."""
    if os.name != "posix" or not isinstance(pid, int):
        return False
    if birth:  # else /proc did not tell it
        return born(pid) == birth
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it is another user's
        return True
    return True
