"""Checkpoints of a whole run: complete or not there, and loadable on any number of ranks."""

from __future__ import annotations

import hashlib
import logging
import math
import operator
import os
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from torch import nn

from ..collectives.consistency import check_fingerprint, fingerprint_of, raise_everywhere
from ..collectives.differences import name_ranks
from ..collectives.ops import all_gather_object
from ..collectives.sharded import explain_sharded
from ..collectives.sync import exchange, run_on_main
from ..errors import CheckpointError, PeerError
from ..launch.ranks import get_rank, get_world_size, is_main_process
from ..process_group import lifecycle
from ..process_group.failures import message_of
from ..seeding.generator_states import check_rng_state, get_rng_state, set_rng_state, set_rng_states
from .files import dump, from_bytes, read, to_bytes, unreadable, write_durably
from .folder_lock import FolderLock, lock_folder
from .states import (
    Before,
    contradictions,
    describe,
    fingerprint,
    is_consolidated,
    is_fsdp,
    load_into,
    misfits,
    path_to,
    state_of,
    synced_buffers,
    tensors_of,
)

T = TypeVar("T")

_log = logging.getLogger(__name__)
_FORMAT = 1
_NAME = re.compile(r"step-(\d{9,})\.pt")
_LEFT_OVER = re.compile(rf"({_NAME.pattern}|latest)\.tmp")  # by a writer that was killed
_OWN = ("step", "score")  # names under which load() returns what is the checkpoint's own
_LINES = 10  # of a message that lists things
_TRIES = 20  # at a file that some ranks see and others do not


class Checkpointer:
    """Saves and restores a run in one folder that every rank can read.

    A checkpoint is one file that plain `torch.load` reads too: `torch.load(path)["state"]["model"]`. It becomes visible
    when it is complete and on the disk; then the text file `latest` lists it, the last written first. While a
    `Checkpointer` that has saved exists, no other job can save into its folder, nor one of this job that keeps others.

    Args:
        folder: Where the checkpoints live; made by the first `save()`.
        keep: Number of checkpoints to keep, the last written ones; at least 1.
        keep_best: Number of checkpoints to keep besides, those with the greatest `score`.

    Raises:
        ValueError: If a number is out of range or `folder` is a file.

    Example:
        >>> import tempfile, torch, ddpkit
        >>> model = torch.nn.Linear(2, 1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     checkpoints = ddpkit.Checkpointer(folder)
        ...     print(checkpoints.load_latest(model=model))
        ...     print(checkpoints.save(100, model=model, best=0.5).name)
        ...     print(checkpoints.load_latest(model=model), checkpoints.steps())
        None
        step-000000100.pt
        {'step': 100, 'best': 0.5} [100]
    """

    def __init__(self, folder: str | os.PathLike[str], *, keep: int = 3, keep_best: int = 0) -> None:
        self.folder = Path(folder)
        self.keep = _count(keep, 1, "keep must be a number of checkpoints")
        self.keep_best = _count(keep_best, 0, "keep_best must be a number of checkpoints")
        self._lock: FolderLock | None = None
        if self.folder.exists() and not self.folder.is_dir():
            raise ValueError(f"The checkpoint folder {self.folder} is a file. Pass a folder, or a path not yet in use.")

    def __repr__(self) -> str:
        best = f", keep_best={self.keep_best}" if self.keep_best else ""
        return f"Checkpointer({str(self.folder)!r}, keep={self.keep}{best})"

    def steps(self) -> list[int]:
        """Return the steps of the checkpoints in the folder, in increasing order; they are not opened."""
        return sorted({_step_of(name) for name in self._names()})

    def save(
        self, step: int, *, score: float | None = None, per_rank: Mapping[str, Any] | None = None, **state: Any
    ) -> Path:
        """Write a checkpoint and delete all but the last `keep` and the best `keep_best`. Collective.

        Only rank 0's state is written, so it must be that of every rank, to the last bit; each rank computes a digest
        of its own to make sure. Not compared are buffers of a model in DDP that sends rank 0's to all before the next
        forward, and optimizers with `consolidate_state_dict()`, which is called.

        Args:
            step: Optimiser steps done, at least 0; it names the file. The same on every rank.
            score: How good this checkpoint is, greater being better, for `load_best()`. The same on every rank.
            per_rank: What each rank has its own of, by name, but not "step" or "score": kinds of values as in `state`,
                which may be others on each rank. All are written, and loading takes as many ranks.
            **state: What to save: anything with `state_dict()` (modules, wrapped, compiled or not; optimizers,
                schedulers, loaders), or plain data (numbers, strings, tensors, and dicts, lists and tuples of them).
                Each rank's random number generators are added: those of `random`, NumPy (the global one) and torch, on
                the CPU and on the rank's accelerator.

        Returns:
            The file's path.

        Raises:
            CheckpointError: On every rank, if the ranks' states differ, if a tensor is sharded (`fully_shard`, FSDP,
                tensor parallelism), if another job writes into the folder, or a `Checkpointer` of this one that has
                another `keep` or `keep_best`, if rank 0 cannot write, or if loading a value would need code from the
                file. The checkpoints written before stay as they are. If only `latest` cannot be written, the message
                says that the checkpoint itself is complete.
            MismatchError: If the ranks pass other steps, scores or names; if another rank passes a bad argument.
            ValueError, TypeError: If an argument cannot be used.
        """
        call, own = "Checkpointer.save", dict[str, Any]()
        with raise_everywhere(call):
            if per_rank is not None:
                own = _named(per_rank)
            step = _count(step, 0, "step must be a number of optimiser steps")
            score = None if score is None else float(score)
            if both := own.keys() & state.keys():
                raise ValueError(f"{', '.join(sorted(both))} is in per_rank and beside it. Pass it once.")
        names = {"names": ", ".join(state), "names in per_rank": ", ".join(own)}
        check_fingerprint(fingerprint_of(call, {"step": f"{step}", "score": f"{score}", **names}))
        _all_or_none(lambda: _refuse_sharded(call, state | own))
        for optimizer in filter(is_consolidated, state.values()):
            with lifecycle.peer_errors():
                optimizer.consolidate_state_dict(to=0)
        content, mine = _all_or_none(lambda: _draft(step, score, state, own))
        if lifecycle.joined():
            _compare(state, content["state"])
        parts = [from_bytes(part) for part in all_gather_object(mine)]
        content["rng"] = [part.pop("rng") for part in parts]
        if own:
            content["per_rank"] = parts
        path = self.folder / f"step-{step:09d}.pt"
        _on_main(lambda: self._write(path, score, content))
        return path

    def load_latest(self, **objects: Any) -> dict[str, Any] | None:
        """Restore the last complete checkpoint, as `load()` does. Collective.

        A file that cannot be read is reported as a warning and left alone, and the one before it is taken.

        Returns:
            What `load()` returns; None if the folder holds no checkpoint.

        Raises:
            CheckpointError: On every rank, if there are checkpoints but none can be read, with the reason for each; or
                as `load()` does.
            MismatchError: As `load()` does.
            TypeError: As `load()` does.
        """
        return self._load_first("Checkpointer.load_latest", self._names, objects)

    def load_best(self, **objects: Any) -> dict[str, Any] | None:
        """Restore the checkpoint with the greatest score, the last written of equal ones. Collective.

        In everything else it is `load_latest()`; None if no checkpoint has a score.
        """
        return self._load_first("Checkpointer.load_best", lambda: _best(self._listed()), objects)

    def load(self, path: str | os.PathLike[str], **objects: Any) -> dict[str, Any]:
        """Restore one checkpoint, in place. Collective.

        Either everything is restored on every rank, or nothing is and every rank raises. Without `objects` the file is
        only read. With some, the random number generators are restored too: each rank's own if as many ranks saved
        them, else new ones derived from the saved.

        Args:
            path: A file that `save()` wrote.
            **objects: What to restore, by the names given to `save()`: anything with `state_dict()` and
                `load_state_dict()`. A module may be wrapped or compiled differently now. The state of each is copied to
                the CPU meanwhile, to undo a load that fails.

        Returns:
            `step`, `score` if there is one, and whatever else was saved and not restored into an object, tensors on the
            CPU.

        Raises:
            TypeError: If an object has no `load_state_dict()`.
            CheckpointError: On every rank, if the file is damaged, holds pickled code, lacks a name or does not fit an
                object, if another rank reads another file, or if it holds states per rank of another number of ranks.
            MismatchError: If the ranks pass other names; if another rank passes a bad argument.
        """
        with raise_everywhere("Checkpointer.load"):
            file = _as_path(path)
        _check_targets("Checkpointer.load", objects)
        return _restore(file, _read_everywhere(file, objects), objects)

    def _load_first(
        self, call: str, candidates: Callable[[], list[str]], objects: Mapping[str, Any]
    ) -> dict[str, Any] | None:
        _check_targets(call, objects)
        broken: dict[str, str] = {}
        tries: dict[str, int] = {}
        while name := _on_main(lambda: next((name for name in candidates() if name not in broken), None)):
            path = self.folder / name
            try:
                content = _read_everywhere(path, objects)
            except CheckpointError as error:  # the same on every rank
                tries[name] = tries.get(name, 0) + 1
                if isinstance(error, _Changing) and tries[name] < _TRIES:  # a job beside this one saves and deletes
                    time.sleep(0.05)
                    continue
                if is_main_process():
                    _log.warning("%s Trying the checkpoint before it.", error)
                broken[name] = f"\n  {error}"
                continue
            return _restore(path, content, objects)
        if broken:
            raise CheckpointError(f"No checkpoint in {self.folder} can be read:{''.join(broken.values())}")
        return None

    def _write(self, path: Path, score: float | None, content: Mapping[str, Any]) -> None:
        """Write a checkpoint, list it in `latest`, and delete those that are not kept any more."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = self._lock_folder()
            self._delete_left_overs()
            write_durably(path, lambda file: dump(content, file))
        except OSError as error:
            raise CheckpointError(
                f"Cannot write to {self.folder}: {error}. Earlier checkpoints are complete."
            ) from error
        listed = {path.name: score} | {name: old for name, old in self._listed().items() if name != path.name}
        kept = {*list(listed)[: self.keep], *_best(listed)[: self.keep_best]}
        lines = [name if listed[name] is None else f"{name} {listed[name]!r}" for name in listed if name in kept]
        text = "".join(f"{line}\n" for line in lines)
        try:
            write_durably(self.folder / "latest", lambda file: file.write(text.encode()))
        except OSError as error:
            raise CheckpointError(
                f"Saved {path}, which is complete, but cannot list it in {self.folder / 'latest'}: {error}. So "
                "load_latest() and load_best() may take another checkpoint; load(path) takes this one. "
                "No older one was deleted."
            ) from error
        for name in listed.keys() - kept:
            try:
                (self.folder / name).unlink(missing_ok=True)
            except OSError as error:
                _log.warning("Saved %s, but an old checkpoint stays: %s.", path, error)

    def _lock_folder(self) -> FolderLock:
        """Lock the folder for this process, and for the rule by which checkpoints are kept."""
        lock = lock_folder(self.folder)
        for other in lock.writers:
            if (other.keep, other.keep_best) != (self.keep, self.keep_best):
                raise CheckpointError(
                    f"{other!r} saves here, too, and keeps other checkpoints than {self!r}: each would delete the "
                    "other's. Give each a folder of its own."
                )
        lock.writers.add(self)
        return lock

    def _delete_left_overs(self) -> None:
        """Delete what a writer that was killed has left."""
        for entry in os.listdir(self.folder):
            if _LEFT_OVER.fullmatch(entry):
                with suppress(OSError):
                    os.unlink(self.folder / entry)

    def _names(self) -> list[str]:
        """Return the checkpoints' names, last written first; then those that `latest` does not list, by step."""
        listed, others = list(self._listed()), self._written()
        while (now := list(self._listed())) != listed:  # a writer has changed it meanwhile
            listed, others = now, self._written()
        return listed + sorted(others.difference(listed), key=_step_of, reverse=True)

    def _written(self) -> set[str]:
        """Return the names of all checkpoints in the folder, listed or not."""
        try:
            return {name for name in os.listdir(self.folder) if _is_checkpoint(self.folder, name)}
        except FileNotFoundError:
            return set()

    def _listed(self) -> dict[str, float | None]:
        """Return what this class wrote here, last written first, with the scores: nothing else is ever deleted."""
        try:
            lines = (self.folder / "latest").read_text(errors="replace").splitlines()
        except OSError:
            return {}
        listed: dict[str, float | None] = {}
        for line in lines:
            name, _, score = line.partition(" ")
            if _is_checkpoint(self.folder, name):
                listed.setdefault(name, _as_score(score))
        return listed


class _Changing(CheckpointError):
    """A file that has gone, or is another one, since its name was read."""


class _Draft(NamedTuple):
    content: dict[str, Any]  # what rank 0 writes, but for what comes from each rank
    mine: bytes  # what comes from this one


def _count(value: Any, least: int, what: str) -> int:
    try:
        if isinstance(value, (bool, np.bool_)):  # older versions of NumPy take theirs for an index
            raise TypeError
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if number < least:
        raise ValueError(f"{what}, an int of at least {least}, got {value!r}.")
    return number


def _named(values: Any) -> dict[str, Any]:
    if not isinstance(values, Mapping) or not all(isinstance(name, str) for name in values):
        raise TypeError(f"per_rank must be a dict of values by name, got {values!r}.")
    taken = [name for name in values if name in _OWN]
    if taken:
        raise ValueError(
            f"per_rank cannot hold {', '.join(taken)}: under the names {', '.join(_OWN)} load() returns what is "
            "the checkpoint's own. Choose others."
        )
    return dict(values)


def _as_path(path: Any) -> Path:
    try:
        return Path(path)
    except TypeError:
        raise TypeError(f"path must be that of a file that save() wrote, got {path!r}.") from None


def _is_checkpoint(folder: Path, name: str) -> bool:
    return _NAME.fullmatch(name) is not None and (folder / name).is_file()


def _step_of(name: str) -> int:
    return int(name[len("step-") : -len(".pt")])


def _as_score(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _best(listed: Mapping[str, float | None]) -> list[str]:
    """Return the names that have a score, the greatest first, NaN last."""
    scores = {name: -math.inf if math.isnan(score) else score for name, score in listed.items() if score is not None}
    return sorted(scores, key=lambda name: scores[name], reverse=True)


def _refuse_sharded(call: str, values: Mapping[str, Any]) -> None:
    tensors = [named for name, value in values.items() for named in tensors_of(name, value)]
    if problem := explain_sharded(call, tensors):
        raise CheckpointError(problem)
    if fsdp := [name for name, value in values.items() if is_fsdp(value)]:
        raise CheckpointError(
            f"{call} does not handle sharded tensors, but {', '.join(fsdp)} is wrapped in FSDP: each rank holds only "
            "its own part. Use torch.distributed.checkpoint for it."
        )


def _draft(step: int, score: float | None, state: Mapping[str, Any], own: Mapping[str, Any]) -> _Draft:
    main = is_main_process()
    written = {name: state_of(value) for name, value in state.items() if main or not is_consolidated(value)}
    mine = {name: state_of(value) for name, value in own.items()}
    tensors = [*tensors_of("state", written), *tensors_of("per_rank", mine)]
    if problem := explain_sharded("Checkpointer.save", tensors):  # in what only its state dict shows
        raise CheckpointError(problem)
    if empty := [name for name, tensor in tensors if tensor.is_meta]:
        raise CheckpointError(f"Cannot save {empty[0]}: it is on the meta device and has no values. Make it with some.")
    kinds, shapes = _described(state)
    content = {
        "format": _FORMAT,
        "step": step,
        "score": score,
        "state": written,
        "kinds": kinds,
        "shapes": shapes,
    }
    own_kinds, own_shapes = _described(own)
    part = {"rng": get_rng_state(), "per_rank": mine, "kinds": own_kinds, "shapes": own_shapes}
    return _Draft(content, _pack(part))


def _described(values: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the classes of those values that have one that matters, and the shapes of all, by name."""
    kinds: dict[str, str] = {}
    shapes: dict[str, Any] = {}
    for name, value in values.items():
        kind, shapes[name] = describe(value)
        if kind:
            kinds[name] = kind
    return kinds, shapes


def _pack(mine: dict[str, Any]) -> bytes:
    for name, value in mine["per_rank"].items():
        try:
            from_bytes(to_bytes(value))
        except Exception as error:
            raise CheckpointError(f"Cannot save per_rank[{name!r}]: {error}") from error
    return to_bytes(mine)


def _compare(values: Mapping[str, Any], written: Mapping[str, Any]) -> None:
    """Raise on every rank unless all would write the same. Collective."""
    mine: dict[str, str] = {}
    for name, value in values.items():
        if is_consolidated(value):
            continue
        mine.update(fingerprint(name, written[name]))
        for buffer in synced_buffers(value):
            mine.pop(path_to(name, buffer), None)
    digest = hashlib.sha256(repr(sorted(mine.items())).encode()).hexdigest()
    if len(set(exchange(digest))) == 1:
        return
    everyone = all_gather_object(mine)
    lines = []
    for name in dict.fromkeys(name for entries in everyone for name in entries):
        holders: dict[str, list[int]] = {}
        for rank, entries in enumerate(everyone):
            holders.setdefault(entries.get(name, "absent"), []).append(rank)
        if len(holders) > 1:
            lines.append(f"{name}: " + "; ".join(f"{text} on {name_ranks(who)}" for text, who in holders.items()))
    raise CheckpointError(
        "\n  ".join([f"Nothing was saved: {len(lines)} entries differ between ranks:", *_some(lines)])
        + "\nOnly rank 0's would be written. Make them equal first (BatchNorm's statistics and other buffers with "
        "ddpkit.sync_buffers(model), data with ddpkit.broadcast), or save what each rank has its own of with "
        "per_rank={name: value}."
    )


def _some(lines: list[str]) -> list[str]:
    return lines if len(lines) <= _LINES else [*lines[:_LINES], f"and {len(lines) - _LINES} more"]


def _on_main(fn: Callable[[], T]) -> T | None:
    """Run `fn` on rank 0 and give its value, plain data, to all; what goes wrong there is raised on all. Collective."""

    def attempt() -> tuple[T | None, str]:
        try:
            return fn(), ""
        except (CheckpointError, OSError) as error:
            return None, str(error)

    value, problem = run_on_main(attempt)
    if problem:
        raise CheckpointError(problem)
    return value


def _all_or_none(fn: Callable[[], T], doing: str = "") -> T:
    """Run `fn` on every rank; if it raises on any, all raise one error that says where and why. Collective."""
    problem, cause = "", None
    try:
        value = fn()
    except PeerError:
        raise
    except Exception as error:
        cause, problem = error, message_of(error)
        if not isinstance(error, CheckpointError):
            problem = f"{doing}{type(error).__name__}: {problem}"
    problems = exchange(problem)
    if not any(problems):
        return value
    raise CheckpointError(_merged(problems)) from cause


def _merged(problems: list[str]) -> str:
    if len(set(problems)) == 1:
        return problems[0]
    return "\n".join(f"Rank {rank}: {text}" for rank, text in enumerate(problems) if text)


def _check_targets(call: str, objects: Mapping[str, Any]) -> None:
    with raise_everywhere(call):
        for name, target in objects.items():
            if not hasattr(target, "load_state_dict") or not hasattr(target, "state_dict"):
                raise TypeError(
                    f"{name}={target!r} has no load_state_dict(). Plain data comes back in the returned dict."
                )
    check_fingerprint(fingerprint_of(call, {"names": ", ".join(objects)}))
    _all_or_none(lambda: _refuse_sharded(call, objects))


def _read_everywhere(path: Path, objects: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a file that every rank reads. Collective.

    Raises:
        CheckpointError: On every rank, if one cannot read it, or it is no checkpoint that could be restored.
    """
    file, problem = None, ""
    try:
        file = open(path, "rb")  # noqa: SIM115  # held open: it may be deleted before all have read it
    except (OSError, ValueError) as error:  # the second for a name with a null character
        problem = message_of(unreadable(path, error))
    try:
        if any(problems := exchange(problem)):
            raise _Changing(_merged(problems))
        assert file is not None
        content, digest = _all_or_none(lambda: _read(path, file, bool(objects)), f"Cannot read {path}: ")
    finally:
        if file is not None:
            file.close()
    if len(digests := set(exchange(digest))) > 1:
        raise _Changing(f"The ranks see {len(digests)} different files at {path}. They must share the folder.")
    return content


def _read(path: Path, file: Any, restores: bool) -> tuple[dict[str, Any], str]:
    content, digest = read(file)
    if problem := _problem_of(content, restores):
        raise CheckpointError(f"Cannot read {path}: {problem}.")
    return content, digest


def _problem_of(content: Any, restores: bool) -> str:
    """Say what is wrong with a file's content; "" if it has the form that `save()` gives it."""
    if not isinstance(content, dict):
        return f"it holds a {type(content).__name__}, which no Checkpointer wrote"
    if type(content.get("format")) is not int or content["format"] != _FORMAT:
        return f"its format is {content.get('format')}, this ddpkit reads {_FORMAT}"
    rng = content.get("rng")
    parts = content.get("per_rank")
    whole = {
        "step": isinstance(content.get("step"), int) and content["step"] >= 0,
        "score": isinstance(content.get("score"), float | None),
        "state": _is_named(content.get("state")),
        "kinds": _are_kinds(content.get("kinds")),
        "shapes": _is_named(content.get("shapes", {})),
        "rng": isinstance(rng, list) and bool(rng) and all(isinstance(state, dict) for state in rng),
        "per_rank": parts is None or (isinstance(parts, list) and all(map(_is_part, parts))),
    }
    if wrong := [name for name, right in whole.items() if not right]:
        return f"its {', '.join(wrong)} is missing or not what a Checkpointer writes"
    if restores and isinstance(rng, list):
        try:
            check_rng_state(rng[get_rank() if get_rank() < len(rng) else 0])
        except ValueError as error:
            return f"{error}; load(path) without objects still reads the rest"
    return ""


def _is_named(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(name, str) for name in value)


def _are_kinds(value: Any) -> bool:
    return _is_named(value) and all(isinstance(kind, str) for kind in value.values())


def _is_part(value: Any) -> bool:
    if not isinstance(value, dict) or not _are_kinds(value.get("kinds", {})):  # older versions wrote none
        return False
    return _is_named(value.get("per_rank")) and _is_named(value.get("shapes"))


def _restore(path: Path, content: dict[str, Any], objects: Mapping[str, Any]) -> dict[str, Any]:
    """Load a checkpoint's content into objects, on all ranks or on none; return the rest. Collective."""
    state = _all_or_none(lambda: _fitting(path, content, objects), f"{path} does not fit; nothing was loaded: ")
    before: list[Before] = []
    rng: list[dict[str, Any]] = []

    def restore() -> None:
        if objects:
            rng.append(get_rng_state())
        for name, target in objects.items():
            before.append(Before(name, target))
            load_into(target, state.pop(name))
        if objects:
            set_rng_states(content["rng"])

    def put_back() -> None:
        for former in rng:
            set_rng_state(former)
        problems = []
        for one in reversed(before):
            try:
                one.put_back()
            except CheckpointError as error:
                problems.append(str(error))
        if problems:
            raise CheckpointError("\n".join(problems))

    try:
        _all_or_none(restore)
    except CheckpointError as error:
        try:
            _all_or_none(put_back)
        except CheckpointError as worse:
            raise CheckpointError(f"Cannot load {path}: {error}\n{worse}") from error
        raise CheckpointError(f"Cannot load {path}; nothing was changed: {error}") from error
    except BaseException:
        with suppress(CheckpointError):
            put_back()
        raise
    score = {} if content.get("score") is None else {"score": content["score"]}
    return {"step": content["step"], **score, **state}


def _fitting(path: Path, content: Mapping[str, Any], objects: Mapping[str, Any]) -> dict[str, Any]:
    """Return this rank's states by name, if those asked for are there and fit."""
    state, shapes = dict(content["state"]), dict(content.get("shapes", {}))
    kinds = dict(content["kinds"])
    if parts := content.get("per_rank"):
        if len(parts) != get_world_size():
            names = ", ".join(parts[0]["per_rank"])
            raise CheckpointError(
                f"{path} holds {names} of each of {len(parts)} ranks, and this job has {get_world_size()}. Run on "
                f'{len(parts)} ranks, or read it with torch.load(path)["per_rank"].'
            )
        part = parts[get_rank()]
        state |= part["per_rank"]
        shapes |= part["shapes"]
        kinds |= part.get("kinds", {})
    problems = []
    for name, target in objects.items():
        if name in state:
            found = misfits(target, state[name], kinds.get(name), shapes.get(name))
            problems += [f"{name} {problem}" for problem in found]
        else:
            problems.append(f"{name} is not in it, but {', '.join(state) or 'nothing'} is")
    if not problems:
        modules = {name: (target, state[name]) for name, target in objects.items() if isinstance(target, nn.Module)}
        problems = contradictions(modules)
    if problems:
        raise CheckpointError("\n  ".join([f"{path} does not fit; nothing was loaded:", *_some(problems)]))
    return state
