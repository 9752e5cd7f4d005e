"""Checkpoints of a whole run: complete or absent, and loadable on any number of ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..arguments import as_integer
from ..collectives.consistency import check_fingerprint, fingerprint_of, raise_everywhere
from ..collectives.sync import run_on_main
from ..errors import CheckpointError
from ..job import current_job
from ..job.lifecycle import exchange
from ..launch.ranks import is_main_process
from ..parallel.models import without_dtensors
from .files import Check, writing_into
from .folder import (
    FolderLock,
    Writing,
    delete_left_overs,
    find_best,
    find_checkpoints,
    finish_writing,
    lock_folder,
    name_of,
    step_of,
)
from .loading import load_file, load_first
from .saving import (
    Memory,
    collect,
    raise_problems,
    refuse_sharded,
    snapshot,
    try_on_all,
    write,
)
from .sharded import WrittenPieces
from .states import ByName, has_names, tensors_in, unwrap

_RESERVED = ("step", "score")  # keys in the result of load()


class Checkpointer:
    """Save and restore a run in a folder that all ranks share.

    A checkpoint is one file that plain `torch.load` can read: `torch.load(path)["state"]["model"]`.
    For sharded tensors (`fully_shard`, HSDP, tensor parallelism) the file holds the shapes, and
    each rank writes its own pieces beside it. A checkpoint becomes visible when it is complete and
    on the disk; the text file `latest` then lists it, last written first. While a `Checkpointer`
    that has saved exists, no other job can save into its folder, nor can a `Checkpointer` of this
    job with other `keep` or `keep_best`.

    Args:
        folder: Folder of the checkpoints; the first `save()` creates it. A relative path is relative
            to the current directory when the `Checkpointer` is created, the same on every rank; `~` is
            the home folder.
        keep: Number of checkpoints to keep, the last written ones; at least 1.
        keep_best: Number of checkpoints with the greatest `score` to keep in addition.

    Raises:
        ValueError: If a number is out of range, or `folder` is a file.

    Example:
        >>> import tempfile, torch, ddpkit
        >>> model = torch.nn.Linear(2, 1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     checkpoints = ddpkit.Checkpointer(folder)
        ...     print(checkpoints.load_latest(model=model))
        ...     print(checkpoints.save(100, model=model, best=0.5).name)
        ...     print(checkpoints.load_latest(model=model), checkpoints.steps())
        ...     _ = checkpoints.save(200, model=model, wait=False)  # a thread writes
        ...     checkpoints.wait()
        ...     print(checkpoints.steps())
        None
        step-000000100.pt
        {'step': 100, 'best': 0.5} [100]
        [100, 200]
    """

    def __init__(self, folder: str | os.PathLike[str], *, keep: int = 3, keep_best: int = 0) -> None:
        self.folder = _as_path(folder)
        is_relative = not Path(folder).expanduser().is_absolute()
        self._compared = {"folder (pass an absolute path)": f"{self.folder}"} if is_relative else {}  # by the ranks
        self.keep = as_integer(keep, "keep")
        self.keep_best = as_integer(keep_best, "keep_best", least=0)
        self._lock: FolderLock | None = None
        self._writing: Writing | None = None  # until its error was raised on all ranks
        self._memory: Memory = {}  # of the last copy
        if self.folder.exists() and not self.folder.is_dir():
            problem = f"The checkpoint folder {self.folder} is a file."
            raise ValueError(f"{problem} Pass a folder, or a path not yet in use.")

    def __repr__(self) -> str:
        text = f"Checkpointer({str(self.folder)!r}, keep={self.keep}"
        if self.keep_best:
            text += f", keep_best={self.keep_best}"
        return f"{text})"

    def steps(self) -> list[int]:
        """Return the steps of the checkpoints in the folder, in increasing order, without opening them."""
        return sorted({step_of(name) for name in find_checkpoints(self.folder)})

    def save(
        self,
        step: int,
        *,
        score: float | None = None,
        per_rank: Mapping[str, Any] | None = None,
        wait: bool = True,
        **state: Any,
    ) -> Path:
        """Write a checkpoint; delete all but the last `keep` and the best `keep_best`. Collective.

        Only rank 0's state is written, so all ranks' states must be equal to the last bit; each rank
        computes a digest to check. Of a DTensor each rank writes its own piece; pieces held by several
        ranks are compared among them and written once. Exceptions to the check are buffers of a DDP
        model that broadcasts rank 0's before the next forward, and optimizers with
        `consolidate_state_dict()`, which is called.

        Args:
            step: Optimiser steps done, at least 0; it names the file. The same on every rank.
            score: Quality of the checkpoint, greater is better, for `load_best()`. The same on every
                rank.
            per_rank: Values that differ between ranks, by name (not "step" or "score"), of the types
                allowed in `state`. All are written; loading then needs the same number of ranks.
            wait: Whether to wait until the checkpoint is complete. If not, rank 0 copies the states
                (each rank its own pieces), and a thread writes the copy; the states may change at
                once. The next call that saves, loads or waits first waits for it, and raises its
                error. The process does not exit before it is complete, unless it is killed. The same
                on every rank.
            **state: What to save: anything with `state_dict()` (modules, wrapped, compiled or not;
                optimizers, schedulers, loaders), or plain data (numbers, strings, tensors, and dicts,
                lists and tuples of them). NumPy's numbers and strings become Python's. Each rank's
                random number generators are added: `random`, NumPy (the global one) and torch, on the
                CPU and the rank's accelerator.

        Returns:
            The file's path. With `wait=False` the file does not exist yet.

        Raises:
            CheckpointError: On every rank, if states differ between ranks, a tensor is sharded other
                than as a DTensor (FSDP1) or in `per_rank`, another job, or a `Checkpointer` of this
                one with other `keep` or `keep_best`, writes into the folder, a rank cannot write, or
                loading a value would need code from the file. Earlier checkpoints stay. If only
                `latest` cannot be written, the message says that the checkpoint itself is complete.
                If it is the error of an earlier `save(wait=False)`, the message says so, and nothing
                was saved.
            MismatchError: If steps, scores, names, ``wait`` or the current directories of a relative folder
                differ between ranks, or another rank passes a bad argument.
            TypeError: If an argument is of a wrong type.
            ValueError: If a number is out of range, or a name is used twice.
        """
        call = "Checkpointer.save"
        with raise_everywhere(call):
            own = _checked_values(per_rank, state)
            step = as_integer(step, "step", least=0)
            if score is not None:
                score = float(score)
            if not isinstance(wait, bool):
                raise TypeError(f"wait must be True or False, got {wait!r}.")
        passed = self._compared | {
            "step": f"{step}",
            "score": f"{score}",
            "wait": f"{wait}",
            "names": ", ".join(state),
            "names in per_rank": ", ".join(own),
        }
        check_fingerprint(fingerprint_of(call, passed))
        self._wait_for_writing()
        path = self.folder / name_of(step)
        state = {name: unwrap(value) for name, value in state.items()}
        content, pieces = collect(path, score, state, own)
        try_on_all(lambda: self._prepare_folder(pieces))
        doing = "" if wait else f"Saving step {step} without waiting failed: "
        writing = Writing(doing, is_shared=bool(pieces.entry))
        try:
            try_on_all(lambda: self._start_writing(writing, path, content, pieces, wait))
            if wait:
                self._wait_for_writing()
        except BaseException:
            if wait:  # it reads the states themselves
                writing.cancel()
                self._writing = None
            raise
        if not wait:
            current_job.finish_before_leaving(self, self.wait)
        return path

    def wait(self) -> None:
        """Wait until the checkpoint of `save(wait=False)` is complete. Collective.

        `distributed()` calls it at the end of its block. Otherwise call it at the end of the
        training: without it, an error of the last save is only logged.

        Raises:
            CheckpointError: On every rank, if the checkpoint could not be written.
        """
        check_fingerprint(fingerprint_of("Checkpointer.wait"))
        self._wait_for_writing()

    def load_latest(self, **objects: Any) -> dict[str, Any] | None:
        """Restore the last complete checkpoint, as `load()` does. Collective.

        A file that cannot be read causes a warning, and the one before it is loaded.

        Returns:
            The result of `load()`; None if the folder holds no checkpoint.

        Raises:
            CheckpointError: On every rank, if no checkpoint can be read, with the reason for each, or
                `latest` exists and cannot; or as `load()` does.
            MismatchError: As `load()` does.
            TypeError: As `load()` does.
        """
        objects = self._begin_load("Checkpointer.load_latest", objects)
        return load_first(self.folder, find_checkpoints, objects)

    def load_best(self, **objects: Any) -> dict[str, Any] | None:
        """Restore the checkpoint with the greatest score, the latest of equal ones. Collective.

        Otherwise like `load_latest()`; None if no checkpoint has a score.
        """
        objects = self._begin_load("Checkpointer.load_best", objects)
        return load_first(self.folder, find_best, objects)

    def load(self, path: str | os.PathLike[str], **objects: Any) -> dict[str, Any]:
        """Restore one checkpoint, in place. Collective.

        Nothing changes on any rank unless the file is complete and fits the objects of every rank.
        Without `objects` the file is only read. With `objects` the random number generators are
        restored, too: each rank's own if the same number of ranks saved them, else new ones derived
        from the saved ones.

        Args:
            path: A file that `save()` wrote.
            **objects: Objects to restore, by the names given to `save()`: anything with `state_dict()`
                and `load_state_dict()`. A module may be wrapped, compiled or sharded differently now.

        Returns:
            `step`, `score` if there is one, and everything that was not restored into an object, with
            tensors on the CPU. Sharded tensors are read only without `objects`; with them, they are on
            the meta device.

        Raises:
            TypeError: If an object has no `load_state_dict()`.
            CheckpointError: On every rank, if the file is damaged, holds pickled code, lacks a name or
                does not fit an object, if ranks read different files, or if it holds values per rank
                of another number of ranks. If an object's `load_state_dict()` raises, the message says
                that the objects are in an undefined state: load again, or create them again.
            MismatchError: If names differ between ranks, or another rank passes a bad argument.
        """
        with raise_everywhere("Checkpointer.load"):
            file = Path(os.path.realpath(_as_path(path)))  # the file may be a link, but those in a folder may not
        objects = self._begin_load("Checkpointer.load", objects)
        return load_file(file, objects)

    def _begin_load(self, call: str, objects: ByName) -> dict[str, Any]:
        """Check the objects to restore, wait for unfinished writing, and return the objects unwrapped. Collective."""
        with raise_everywhere(call):
            for name, target in objects.items():
                if not hasattr(target, "load_state_dict") or not hasattr(target, "state_dict"):
                    problem = f"{name}={target!r} has no load_state_dict()."
                    raise TypeError(f"{problem} Leave it out: load() returns plain data.")
        check_fingerprint(fingerprint_of(call, self._compared | {"names": ", ".join(objects)}))
        objects = {name: unwrap(target) for name, target in objects.items()}
        try_on_all(lambda: refuse_sharded(call, without_dtensors(tensors_in(objects))))
        self._wait_for_writing()
        return objects

    def _prepare_folder(self, pieces: WrittenPieces) -> None:
        """Lock the folder for this process, and for its rule of keeping checkpoints, on rank 0."""
        if not is_main_process():
            return
        with writing_into(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = lock_folder(self.folder)
            rule = (self.keep, self.keep_best)
            others = [repr(each) for each in self._lock.writers if (each.keep, each.keep_best) != rule]
            if others:
                raise CheckpointError(
                    f"{others[0]} also saves here, and keeps other checkpoints than {self!r}: "
                    "each would delete the other's. Give each its own folder."
                )
            self._lock.writers.add(self)
            delete_left_overs(self.folder)
            if pieces.entry:
                pieces.folder.mkdir()

    def _start_writing(self, writing: Writing, path: Path, content: ByName, pieces: WrittenPieces, wait: bool) -> None:
        """Start a thread that writes this rank's part; from a copy if nobody waits for it."""
        if not (is_main_process() or pieces.entry):
            return
        mine = (content if is_main_process() else None, pieces.mine)
        self._writing = writing  # also if the copy fails: the other ranks have one
        if self._lock is not None:
            self._lock.writing = writing
        get_saved = snapshot(mine, None if wait else self._memory)

        def write_it(check: Check) -> None:  # it keeps `self`, and so the lock, alive
            write(path, get_saved(), pieces, (self.keep, self.keep_best), check)

        writing.start(write_it)

    def _wait_for_writing(self) -> None:
        """Wait for this job's unfinished writing; raise its error on every rank. Collective."""
        current_job.finish_before_leaving(self, None)
        writing, self._writing = self._writing, None
        if writing is not None and not is_main_process():
            writing.wait()  # rank 0 waits for it
        problems = [run_on_main(lambda: finish_writing(self.folder, writing))]
        if writing is not None and writing.is_shared:
            problems = exchange(writing.problem)
        raise_problems(problems)


def _as_path(path: str | os.PathLike[str]) -> Path:
    """Return an absolute path, so that the script may change its directory; `~` is the home folder."""
    return Path(path).expanduser().absolute()


def _checked_values(per_rank: Mapping[str, Any] | None, state: ByName) -> dict[str, Any]:
    """Return the values per rank, by name.

    Raises:
        TypeError: If it is not a mapping with names as keys.
        ValueError: If a name is reserved, or also names a state of all ranks.
    """
    own = {} if per_rank is None else per_rank
    if not has_names(own):
        raise TypeError(f"per_rank must be a dict of values by name, got {per_rank!r}.")
    for name in own:
        if name in _RESERVED:
            raise ValueError(f"per_rank cannot hold {name}: load() returns the checkpoint's own under that name.")
        if name in state:
            raise ValueError(f"Passed both in per_rank and as keyword: {name}. Pass each once.")
    return dict(own)
