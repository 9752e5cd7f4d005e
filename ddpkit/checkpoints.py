"""Checkpoints of a whole run: complete or not there, and loadable on any number of ranks."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any, TypeVar

from torch import nn
from torch.optim import Optimizer

from .collectives import all_gather_object
from .errors import CheckpointError
from .files import dump, read, write_durably
from .rng import get_rng_state, set_rng_states
from .waiting import exchange, run_on_main
from .wrapping import clean_state_dict, unwrap_model

T = TypeVar("T")
_Opened = tuple[dict[str, Any], str]  # the content and its digest

_log = logging.getLogger(__name__)
_FORMAT = 1


class Checkpointer:
    """Saves and restores a run in one folder that every rank can read.

    A checkpoint is one file that plain `torch.load` reads too: `torch.load(path)["state"]["model"]`. It becomes visible
    when it is complete and on the disk; then the text file `latest` names it.

    Args:
        folder: Where the checkpoints live; made by the first `save()`.
        keep: Number of checkpoints to keep, the last written ones; at least 1.

    Raises:
        ValueError: If `keep` is less than 1 or `folder` is a file.

    Example:
        >>> import tempfile, torch, ddpkit
        >>> model = torch.nn.Linear(2, 1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     checkpoints = ddpkit.Checkpointer(folder)
        ...     print(checkpoints.load_latest(model=model))
        ...     print(checkpoints.save(100, model=model, best=0.5).name)
        ...     print(checkpoints.load_latest(model=model))
        None
        step-000000100.pt
        {'step': 100, 'best': 0.5}
    """

    def __init__(self, folder: str | os.PathLike[str], *, keep: int = 3) -> None:
        if type(keep) is not int or keep < 1:
            raise ValueError(f"keep must be a number of checkpoints, an int of at least 1, got {keep!r}.")
        self.folder, self.keep = Path(folder), keep
        if self.folder.exists() and not self.folder.is_dir():
            raise ValueError(f"The checkpoint folder {self.folder} is a file. Pass a folder, or a path not yet in use.")

    def save(self, step: int, **state: Any) -> Path:
        """Writes a checkpoint and deletes all but the last `keep`. Collective.

        Args:
            step: Optimiser steps done, at least 0; it names the file.
            **state: What to save, as it is on rank 0: anything with `state_dict()` (modules, wrapped, compiled or not;
                optimizers, schedulers, loaders), or plain data (numbers, strings, tensors, and dicts, lists and tuples
                of them). Each rank's random number generators are added: those of `random`, NumPy (the global one)
                and torch, on the CPU and on the rank's accelerator.

        Returns:
            The file's path.

        Raises:
            CheckpointError: On every rank, if rank 0 cannot write, or if loading a value would need code from the file.
                The checkpoints written before stay as they are.
        """
        if type(step) is not int or step < 0:
            raise ValueError(f"step must be a number of optimiser steps, an int of at least 0, got {step!r}.")
        path, rng = self.folder / f"step-{step:09d}.pt", all_gather_object(get_rng_state())
        _on_main(lambda: self._write(path, step, state, rng))
        return path

    def load_latest(self, **objects: Any) -> dict[str, Any] | None:
        """Restores the last complete checkpoint, as `load()` does. Collective.

        A file that cannot be read is reported as a warning and left alone, and the one before it is taken.

        Returns:
            What `load()` returns; None if the folder holds no checkpoint.

        Raises:
            CheckpointError: On every rank, if there are checkpoints but none can be read, with the reason for each; or
                as `load()` does.
        """
        _check_targets(objects)
        opened: list[_Opened] = []
        path = _on_main(lambda: self._newest(opened))
        return _load(path, objects, *opened) if path else None

    def load(self, path: str | os.PathLike[str], **objects: Any) -> dict[str, Any]:
        """Restores one checkpoint, in place. Collective.

        Either everything is restored on every rank, or nothing is and every rank raises. Without `objects` the file is
        only read. With some, the random number generators are restored too: each rank's own if as many ranks saved
        them, else new ones derived from the saved.

        Args:
            path: A file that `save()` wrote.
            **objects: What to restore, by the names given to `save()`: anything with `load_state_dict()`. A module may
                be wrapped or compiled differently now. The state of what is neither a module nor an optimizer is copied
                meanwhile, to undo a load that fails.

        Returns:
            `step` and whatever else was saved and not restored into an object, tensors on the CPU.

        Raises:
            TypeError: If an object has no `load_state_dict()`.
            CheckpointError: On every rank, if the file is damaged, holds pickled code, lacks a name or does not fit an
                object, or if another rank reads another file.
        """
        _check_targets(objects)
        return _load(Path(path), objects)

    def _write(self, path: Path, step: int, state: Mapping[str, Any], rng: list[Any]) -> None:
        kinds = {name: type(value).__name__ for name, value in state.items() if isinstance(value, Optimizer)}
        data = {name: _state_of(value) for name, value in state.items()}
        content = {"format": _FORMAT, "step": step, "state": data, "kinds": kinds, "rng": rng}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for stale in [*self.folder.glob("step-*.pt.tmp"), *self.folder.glob("latest.tmp")]:  # of a killed writer
                stale.unlink()
            write_durably(path, lambda file: dump(content, file))
            write_durably(self.folder / "latest", lambda file: file.write(f"{path.name}\n".encode()))
            for old in self._paths()[self.keep :]:
                old.unlink()
        except OSError as error:
            raise CheckpointError(
                f"Cannot write to {self.folder}: {error}. Earlier checkpoints are complete."
            ) from error

    def _newest(self, opened: list[_Opened]) -> Path | None:
        reasons = []
        for path in self._paths():
            try:
                opened.append(_open(path))
                return path
            except CheckpointError as error:
                _log.warning("%s Trying the checkpoint before it.", error)
                reasons.append(f"\n  {error}")
        if reasons:
            raise CheckpointError(f"No checkpoint in {self.folder} can be read:{''.join(reasons)}")
        return None

    def _paths(self) -> list[Path]:
        """The checkpoints, last written first; before them the one that `latest` names."""
        pointer = self.folder / "latest"
        latest = pointer.read_text(errors="replace").strip() if pointer.is_file() else ""
        paths = self.folder.glob("step-*.pt")
        return sorted(paths, key=lambda path: (path.name == latest, path.stat().st_mtime_ns, path.name), reverse=True)


def _on_main(fn: Callable[[], T]) -> T | None:
    """Runs `fn` on rank 0 and gives its value to all; a `CheckpointError` is raised on all. Collective."""

    def attempt() -> tuple[T | None, str]:
        try:
            return fn(), ""
        except CheckpointError as error:
            return None, str(error)

    value, problem = run_on_main(attempt)
    if problem:
        raise CheckpointError(problem)
    return value


def _all_or_none(fn: Callable[[], T]) -> T:
    """Runs `fn` on every rank; if it raises on any, all raise one error that says where and why. Collective."""
    problem, cause = "", None
    try:
        value = fn()
    except Exception as error:
        cause, problem = error, str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
    problems = exchange(problem)
    if not any(problems):
        return value
    if len(set(problems)) > 1:
        problem = "\n".join(f"Rank {rank}: {text}" for rank, text in enumerate(problems) if text)
    raise CheckpointError(problem) from cause


def _check_targets(objects: Mapping[str, Any]) -> None:
    for name, target in objects.items():
        if not hasattr(target, "load_state_dict"):
            raise TypeError(f"{name}={target!r} has no load_state_dict(). Plain data comes back in the returned dict.")


def _load(path: Path, objects: Mapping[str, Any], opened: _Opened | None = None) -> dict[str, Any]:
    content, digest = _all_or_none(lambda: _fitting(path, opened or _open(path), objects))
    if len(digests := set(exchange(digest))) > 1:
        raise CheckpointError(f"The ranks see {len(digests)} different files at {path}. They must share the folder.")
    state = content["state"]
    _restore([(target, state.pop(name)) for name, target in objects.items()])
    if objects:
        set_rng_states(content["rng"])
    return {"step": content["step"], **state}


def _open(path: Path) -> _Opened:
    content, digest = read(path)
    if content.get("format") != _FORMAT:
        raise CheckpointError(
            f"Cannot read {path}: its format is {content.get('format')}, this ddpkit reads {_FORMAT}."
        )
    return content, digest


def _state_of(value: Any) -> Any:
    if isinstance(value, nn.Module):
        return clean_state_dict(unwrap_model(value).state_dict())
    return value.state_dict() if hasattr(value, "state_dict") else value


def _fitting(path: Path, opened: _Opened, objects: Mapping[str, Any]) -> _Opened:
    state, kinds, problems = opened[0]["state"], opened[0]["kinds"], []
    for name, target in objects.items():
        if name not in state:
            problems.append(f"{name} is not in it, but {', '.join(state) or 'nothing'} is")
        elif isinstance(target, nn.Module):
            problems += [f"{name} {problem}" for problem in _module_misfits(target, state[name])]
        elif isinstance(target, Optimizer):
            problems += [f"{name} {problem}" for problem in _optimizer_misfits(target, state[name], kinds.get(name))]
    if problems:
        if len(problems) > 10:
            problems[10:] = [f"and {len(problems) - 10} more"]
        raise CheckpointError("\n  ".join([f"{path} does not fit; nothing was loaded:", *problems]))
    return opened


def _module_misfits(module: nn.Module, saved: Mapping[str, Any]) -> list[str]:
    there, here = clean_state_dict(saved), _state_of(module)
    misfits = [f"has {key} here, not there" for key in here if key not in there]
    misfits += [f"has {key} there, not here" for key in there if key not in here]
    for key in (key for key in here if key in there):  # in this order on every rank, which no set has
        shapes = [tuple(getattr(state[key], "shape", ())) for state in (there, here)]
        if shapes[0] != shapes[1]:
            misfits.append(f"has {key} of shape {shapes[0]} there, of {shapes[1]} here")
    return misfits


def _optimizer_misfits(optimizer: Optimizer, saved: Mapping[str, Any], kind: str | None) -> list[str]:
    if kind and kind != type(optimizer).__name__:
        return [f"is {kind} there, {type(optimizer).__name__} here"]
    there, here = (
        [len(group["params"]) for group in groups] for groups in (saved["param_groups"], optimizer.param_groups)
    )
    return [f"has groups of {there} tensors there, of {here} here"] if there != here else []


def _restore(pairs: list[tuple[Any, Any]]) -> None:
    """Loads each state into its object. Modules and optimizers were found to fit; others go first and can be undone."""
    others = [(target, state) for target, state in pairs if not isinstance(target, (nn.Module, Optimizer))]
    before = [(target, deepcopy(target.state_dict())) for target, _ in others]
    try:
        _all_or_none(lambda: [target.load_state_dict(state) for target, state in others])
    except CheckpointError:
        for target, state in before:
            target.load_state_dict(state)
        raise
    for target, state in pairs:
        if isinstance(target, nn.Module):
            module, saved = unwrap_model(target), clean_state_dict(state)
            here = module.state_dict()  # its keys still name the wrappers inside the module
            module.load_state_dict({key: saved[clean] for key, clean in zip(here, clean_state_dict(here), strict=True)})
        elif isinstance(target, Optimizer):
            target.load_state_dict(state)
