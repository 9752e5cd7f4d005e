"""The checkpoints in a folder: their names and order, the list `latest` of them, and pruning.

The text file `latest` lists what a `Checkpointer` wrote here, the last written first, with scores.
Nothing else is ever deleted.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import math
import os
import re
import shutil
import socket
import stat
import tempfile
import time
import weakref
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from ..launch.process_tree import boot_id, born, own_birth
from .files import write_durably
from .saving import Writing

Scores = dict[str, float | None]  # by a checkpoint's name, the last written first

_log = logging.getLogger(__name__)
_LIST = "latest"
_CHECKPOINT = re.compile(r"step-(\d{9,})\.pt")
_PIECES = re.compile(r"(step-\d{9,})\.[0-9a-f]{16}")  # a folder of the pieces of sharded tensors
_LEFT_OVER = re.compile(rf"({_CHECKPOINT.pattern}|{_LIST})\.tmp")  # by a writer that was killed


def name_of(step: int) -> str:
    """Name the checkpoint of a step."""
    return f"step-{step:09d}.pt"


def step_of(name: str) -> int:
    """Return the step from a checkpoint's name."""
    return int(name[len("step-") : -len(".pt")])


def find_checkpoints(folder: Path) -> list[str]:
    """Name the checkpoints, the last written first; then those not listed, the greatest step first.

    A name may be gone when it is used, if a job beside this one saves and deletes.
    """
    while True:
        listed = list(_read_list(folder))
        present = _find_files(folder)
        if list(_read_list(folder)) == listed:  # else a writer has changed it meanwhile
            break
    others = present.difference(listed)
    return listed + sorted(others, key=step_of, reverse=True)


def find_best(folder: Path) -> list[str]:
    """Name the listed checkpoints that have a score, the greatest first, NaN last."""
    return _rank_by_score(_read_list(folder))


def _read_list(folder: Path) -> Scores:
    """Read `latest`, without what is no file here; {} if it cannot be read."""
    try:
        text = (folder / _LIST).read_text(errors="replace")
    except OSError:
        return {}
    listed: Scores = {}
    for line in text.splitlines():
        name, _, score = line.partition(" ")
        if _is_checkpoint(folder, name):
            listed.setdefault(name, _parse_score(score))
    return listed


def list_and_prune(path: Path, score: float | None, keep: int, keep_best: int, pieces: str = "") -> None:
    """List a new checkpoint in `latest`, and delete the listed ones that are not kept any more.

    Args:
        path: The checkpoint, complete.
        score: How good it is, if known.
        keep: Number of checkpoints to keep, the last written ones.
        keep_best: Number of checkpoints to keep besides, those with the greatest score.
        pieces: The name of the folder of its pieces, if it has one.

    Raises:
        CheckpointError: If `latest` cannot be written; nothing is deleted then.
    """
    folder = path.parent
    former = _read_list(folder)
    former.pop(path.name, None)
    listed: Scores = {path.name: score, **former}
    last = list(listed)[:keep]
    best = _rank_by_score(listed)[:keep_best]
    kept = {name: listed[name] for name in listed if name in last or name in best}
    try:
        _write_list(folder, kept)
    except OSError as error:
        raise CheckpointError(
            f"Saved {path}, which is complete, but cannot list it in {folder / _LIST}: {error}. "
            "So load_latest() and load_best() may take another checkpoint; load(path) takes this "
            "one. No older one was deleted."
        ) from error
    for name in listed.keys() - kept.keys():
        try:
            (folder / name).unlink(missing_ok=True)
        except OSError as error:
            _log.warning("Saved %s, but an old checkpoint stays: %s.", path, error)
    _delete_unused(folder, of=path.stem, used=pieces)


def delete_left_overs(folder: Path) -> None:
    """Delete the files that a writer which was killed has left."""
    for name in os.listdir(folder):
        if _LEFT_OVER.fullmatch(name):
            with suppress(OSError):
                os.unlink(folder / name)
    _delete_unused(folder)


def is_folder_of(path: Path, name: str) -> bool:
    """Return whether this is the name of a folder for the pieces of a checkpoint."""
    match = _PIECES.fullmatch(name)
    return match is not None and match[1] == path.stem


def _delete_unused(folder: Path, of: str = "", used: str = "") -> None:
    """Delete folders of pieces that no checkpoint uses.

    Args:
        folder: The folder of the checkpoints.
        of: A checkpoint's name without suffix, which uses no other than `used`. Of the others it is
            only seen whether they are there.
        used: The name of the folder that is used.
    """
    for name in os.listdir(folder):
        match = _PIECES.fullmatch(name)
        if match is None or name == used:
            continue
        if match[1] == of or not (folder / f"{match[1]}.pt").is_file():
            shutil.rmtree(folder / name, ignore_errors=True)


def _find_files(folder: Path) -> set[str]:
    """Find the names of all checkpoints in the folder, listed or not."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return set()
    return {name for name in names if _is_checkpoint(folder, name)}


def _is_checkpoint(folder: Path, name: str) -> bool:
    return _CHECKPOINT.fullmatch(name) is not None and (folder / name).is_file()


def _parse_score(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _write_list(folder: Path, scores: Mapping[str, float | None]) -> None:
    text = ""
    for name, score in scores.items():
        shown = "" if score is None else f" {score!r}"
        text += f"{name}{shown}\n"
    write_durably(folder / _LIST, lambda file: file.write(text.encode()))


def _rank_by_score(scores: Mapping[str, float | None]) -> list[str]:
    """Name those that have a score, the greatest first, equal ones in their order, NaN last."""
    known = {name: score for name, score in scores.items() if score is not None}
    numbers = [name for name in known if not math.isnan(known[name])]
    others = [name for name in known if name not in numbers]
    return sorted(numbers, key=known.__getitem__, reverse=True) + others


# Lock folders: one job at a time writes into a folder, and a second one gets an error that names it.
#
# The kernel holds such a lock for this process and drops it when the process ends, however it ends,
# so none can be left behind on this machine. Some shared file systems lock within one machine only,
# so the file that is locked also says which job holds it.

_LOCK_FILE = ".writer"
_FRESH = 300.0  # seconds since its last save in which a job on another machine counts as running
_LENGTH = 10_000  # bytes of a lock's file that are read
_ADVICE = "Two jobs would mix their checkpoints: give each a folder of its own."
_NO_FILE = (errno.ELOOP, errno.EMLINK, errno.ENXIO)  # of opening a link, one on BSD, a socket
_IDENTITIES = (  # variables that a job has again when it is started again, maybe on another machine
    *("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_STEP_ID"),
    *("PBS_JOBID", "LSB_JOBID", "LSB_JOBINDEX"),
)
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


def finish_writing(folder: Path, writing: Writing | None = None) -> str:
    """Wait until this process writes no checkpoint into a folder; return what went wrong with one of them."""
    lock = _locks.get(os.path.realpath(folder))
    if lock is not None and lock.writing is not None:
        lock.writing.finish()
    return "" if writing is None else writing.finish()


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
        self._path = folder / _LOCK_FILE
        self._me = _describe_this_job()
        self._file = -1
        self._release: Finalize | None = None

    def renew(self) -> None:
        """Take the lock, or show that it is still in use; raise if it is another job's."""
        if self._file < 0 or not _is_open(self._path, self._file):
            self._take()  # it was not yet taken, or somebody deleted the file
            return
        if _read(self._file) != self._me:
            raise self._refusal(self._file, "has begun to write into")
        os.utime(self._file)

    def _take(self) -> None:
        with ExitStack() as on_failure:
            file = _open(self._path)
            on_failure.callback(os.close, file)
            self._lock(file)
            if os.fstat(file).st_nlink > 1:  # a backup has it, too, or it is somebody's
                os.unlink(self._path)
            is_at_path = _is_open(self._path, file)
            if is_at_path:
                on_failure.pop_all()
        if not is_at_path:  # it was deleted here, or meanwhile by its former holder
            self._take()
            return
        os.ftruncate(file, 0)
        os.pwrite(file, json.dumps(self._me).encode(), 0)
        if self._release is not None:  # of a file that somebody has deleted
            self._release()
        self._file = file
        self._release = Finalize(self, _release, (self._path, file, self._me), exitpriority=0)

    def _lock(self, file: int) -> None:
        """Lock a file, where the system can; raise if another job writes into the folder."""
        try:
            # not shared with forked workers, as flock's is
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise self._refusal(file, "is writing into") from None
        if _is_open(self._path, file) and self._may_live(_read(file), file):
            when = f" within the last {_FRESH / 60:g} minutes"
            problem = self._refusal(file, "has written into", when)
            raise CheckpointError(f"{problem} If it has ended, delete {self._path}.")

    def _refusal(self, file: int, does: str, when: str = "") -> CheckpointError:
        """Make the error that names the job which a lock's file describes."""
        holder = _read(file)
        job = "Another job"
        if holder:
            process = f"process {holder.get('pid')} on {holder.get('host')}"
            job = f"Another job ({process}, since {holder.get('since')})"
        return CheckpointError(f"{job} {does} {self._folder}{when}. {_ADVICE}")

    def _may_live(self, holder: Mapping[str, Any], file: int) -> bool:
        """Return whether a holder may still run, although this process got the lock.

        That happens where locks do not reach from machine to machine, and where a process has
        closed any other descriptor of the file, by which it loses the lock.
        """
        if not holder or holder == self._me:
            return False
        if holder.get("machine") == self._me["machine"]:
            return holder.get("pid") != self.pid and _is_running(holder)
        if self._me["job"] and holder.get("job") == self._me["job"]:  # this job, started again
            return False
        with tempfile.TemporaryFile(dir=self._folder) as new:  # by the clock of the file system
            age = os.fstat(new.fileno()).st_mtime - os.fstat(file).st_mtime
        return age < _FRESH


def _describe_this_job() -> dict[str, Any]:
    """Describe this process and its job, so that others can name it, and know it again."""
    try:
        machine = boot_id()
    except OSError:
        machine = socket.gethostname()
    found = {name: os.environ.get(name, "") for name in _IDENTITIES}
    identity = [f"{name}={value}" for name, value in found.items() if value not in ("", "none")]
    return {
        "host": socket.gethostname(),
        "machine": machine,
        "pid": os.getpid(),
        "born": own_birth(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
        "job": " ".join(identity),  # torchrun's default is none
        "token": os.urandom(8).hex(),
    }


def _is_running(holder: Mapping[str, Any]) -> bool:
    """Return whether a holder on this machine runs, by its number and by when it started."""
    pid = holder.get("pid")
    if not isinstance(pid, int):
        return False
    try:
        start = born(pid)  # "" if it has ended
    except OSError:
        return True
    return start != "" and holder.get("born") in (start, "", None)


def _open(path: Path) -> int:
    """Open a lock's file, or make it.

    Raises:
        CheckpointError: If it is a symbolic link or no file: what is behind it would be overwritten.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        file = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno not in _NO_FILE:
            raise
    else:
        if stat.S_ISREG(os.fstat(file).st_mode):
            return file
        os.close(file)
    raise CheckpointError(f"{path} is a link or no file, so no Checkpointer made it. Delete it.")


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
