"""Load a checkpoint: every rank reads it, and nothing changes unless it fits on all ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ..collectives.differences import digest, list_lines
from ..data.seeds import set_rng_states
from ..errors import CheckpointError
from ..job.lifecycle import exchange
from ..launch.ranks import get_rank, get_world_size, is_main_process
from ..parallel.lr_scaling import applied_scales
from ..parallel.models import unwrap_model
from ..torch_internals import is_dtensor
from .files import read
from .saving import try_on_all
from .sharded import SavedPieces
from .states import (
    ByName,
    Description,
    describe_object,
    has_names,
    is_ordinary,
    module_state,
    path_to,
    state_for,
    storage_key,
    tensors_in,
)

_log = logging.getLogger(__name__)
_UNDEFINED = (
    "The objects are in an undefined state on every rank, some of them loaded: load a checkpoint "
    "that fits them, or create them again, before continuing."
)


def load_first(folder: Path, candidates: Callable[[Path], list[str]], objects: ByName) -> dict[str, Any] | None:
    """Load the first checkpoint that can be read. Collective.

    Args:
        folder: The folder of the checkpoints.
        candidates: Lists the names in a folder to try, in order.
        objects: The objects to restore, by name.

    Returns:
        The rest of its content; None if there is no candidate.

    Raises:
        CheckpointError: On every rank, if there are candidates but none can be read, or the first
            readable one does not fit.
    """
    reasons: dict[str, str] = {}  # why those tried cannot be read

    def choose() -> str:
        names = candidates(folder) if is_main_process() else []  # again each time: another job may save and delete
        return next((name for name in names if name not in reasons), "")

    while name := exchange(try_on_all(choose))[0]:
        try:
            content, pieces = _read_on_all(folder / name, objects)
        except CheckpointError as error:  # the same on every rank
            if is_main_process():
                _log.warning("%s Trying the checkpoint before it.", error)
            reasons[name] = f"\n  {error}"
            continue
        return _restore(folder / name, content, pieces, objects)
    if reasons:
        texts = "".join(reasons.values())
        raise CheckpointError(f"No checkpoint in {folder} can be read:{texts}")
    return None


def load_file(path: Path, objects: ByName) -> dict[str, Any]:
    """Load one checkpoint, and return the content not restored into an object. Collective.

    Raises:
        CheckpointError: On every rank, if a rank cannot read it, or it does not fit.
    """
    content, pieces = _read_on_all(path, objects)
    return _restore(path, content, pieces, objects)


def _read_on_all(path: Path, objects: ByName) -> tuple[dict[str, Any], SavedPieces]:
    """Return the content of a file that every rank reads. Collective.

    Args:
        path: The file.
        objects: The objects to restore, by name.

    Returns:
        The content, and the reader of its sharded tensors.

    Raises:
        CheckpointError: On every rank, if a rank cannot read it, or it is not a checkpoint that could
            be restored.
    """
    is_sharded = any(is_dtensor(tensor) for _, tensor in tensors_in(objects))
    content, checksum = try_on_all(lambda: read(path, is_sharded))
    files = len(set(exchange(checksum)))
    if files > 1:
        raise CheckpointError(f"The ranks see {files} different files at {path}. They must share the folder.")
    return content, try_on_all(lambda: SavedPieces(path, content, is_sharded))


def _restore(path: Path, content: dict[str, Any], pieces: SavedPieces, objects: ByName) -> dict[str, Any]:
    """Load a checkpoint's content into objects, if it fits them on all ranks. Collective.

    Returns:
        The rest of its content.
    """
    states = try_on_all(
        lambda: _fitting_states(path, content, pieces, objects),
        doing=f"{path} does not fit; nothing was loaded: ",
    )
    rest = {name: state for name, state in states.items() if name not in objects}
    if objects:
        try:
            try_on_all(lambda: _load_into_all(objects, states, pieces, content["rng"]))
        except CheckpointError as error:
            raise CheckpointError(f"Cannot load {path}: {error}\n{_UNDEFINED}") from error
    else:
        rest = try_on_all(lambda: {name: pieces.fill(state) for name, state in rest.items()})
    result = {"step": content["step"]}
    if content.get("score") is not None:
        result["score"] = content["score"]
    return result | rest


def _fitting_states(path: Path, content: ByName, pieces: SavedPieces, objects: ByName) -> dict[str, Any]:
    """Return this rank's states by name; raise if requested ones are missing or do not fit."""
    own = _part_of_this_rank(path, content)
    states = {**content["state"], **own.get("per_rank", {})}
    described = {**content["described"], **own.get("described", {})}
    problems = _explain_misfits(objects, states, described, pieces)
    if problems:
        headline = f"{path} does not fit; nothing was loaded:"
        raise CheckpointError(list_lines(headline, problems))
    return states


def _part_of_this_rank(path: Path, content: ByName) -> dict[str, Any]:
    """Return this rank's own values in a checkpoint; {} if it holds no values per rank."""
    parts: list[dict[str, Any]] = content.get("per_rank") or []
    if not parts:
        return {}
    if len(parts) != get_world_size():
        names = ", ".join(parts[0]["per_rank"])
        raise CheckpointError(
            f"{path} holds {names} for each of {len(parts)} ranks, but this job has "
            f"{get_world_size()}. Run on {len(parts)} ranks, or read it with "
            'torch.load(path)["per_rank"].'
        )
    return parts[get_rank()]


def _load_into_all(objects: ByName, states: ByName, pieces: SavedPieces, rng_states: list[dict[str, Any]]) -> None:
    """Load states into objects that they fit, and restore the random number generators."""
    for name, target in objects.items():
        scales = _scales_of(target)
        state = pieces.spread(target, state_for(target, states[name]))
        unwrap_model(target).load_state_dict(state)
        _warn_of_scales(name, scales, _scales_of(target))
    set_rng_states(rng_states)


def _scales_of(target: Any) -> list[float | None]:
    return applied_scales(target) if isinstance(target, Optimizer) else []


def _warn_of_scales(name: str, here: list[Any], saved: list[Any]) -> None:
    """Warn if an optimizer's learning rates were saved with another global batch."""
    for old, new in zip(saved, here, strict=True):
        if is_main_process() and old and new and old != new:
            _log.warning(
                f"The learning rates of {name} were scaled by {old:g} when saved, and by {new:g} here: the "
                "saved ones were restored. If the global batch has changed, multiply each group's lr, and "
                f"base_lrs of its scheduler, by {new / old:g}."
            )
            return


# Check that saved states fit objects: all problems are found before anything loads.


def _explain_misfits(objects: ByName, states: ByName, described: ByName, pieces: SavedPieces) -> list[str]:
    """Explain why saved states do not fit objects; [] if they do.

    Args:
        objects: The objects, by name.
        states: This rank's states and plain data, by name.
        described: `describe_object()` of the objects that the states were saved from.
        pieces: The reader of sharded tensors in the states.
    """
    found = []
    for name, target in objects.items():
        if name not in states:
            names = ", ".join(states) or "nothing"
            found.append(f"it has no {name!r}; it has: {names}")
            continue
        if isinstance(target, nn.Module):
            problems = _explain_module(target, states[name], pieces)
        else:
            problems = _explain_kind(describe_object(target), described[name])
        found += [f"{name} {problem}" for problem in problems]
    return found or _explain_conflicts(objects, states)


def _explain_module(module: nn.Module, there: Any, pieces: SavedPieces) -> list[str]:
    if not has_names(there):
        return [f"is a {type(there).__name__} in the checkpoint, not a model's state dict"]
    here = module_state(module)
    found = [f"has {key} here, not in the checkpoint" for key in here if key not in there]
    found += [f"has {key} in the checkpoint, not here" for key in there if key not in here]
    for key, value in here.items():  # in this order on every rank, unlike a set
        if key in there:
            found.append(_explain_entry(key, value, there[key], pieces))
    return [problem for problem in found if problem]


def _explain_entry(key: str, here: Any, there: Any, pieces: SavedPieces) -> str:
    """Explain why one entry of a model's state does not fit; "" if it does."""
    if _shape(there) != _shape(here):
        return f"has {key} of shape {_shape(there)} in the checkpoint, {_shape(here)} here"
    if not isinstance(here, Tensor):
        return ""
    if here.is_meta:
        return f"has {key} on the meta device here, which cannot hold values: call to_empty() first"
    return pieces.explain_loss(key, here, there) if isinstance(there, Tensor) else ""


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(value.shape) if isinstance(value, Tensor) else ()


def _explain_kind(here: Description, there: Description) -> list[str]:
    """Explain why the state of an optimizer or scheduler does not fit another one; [] if it does."""
    kind, groups = here
    saved_kind, saved_groups = there
    if not kind or not saved_kind:  # such as a state dict saved as plain data
        return []
    wrapped = (f"Fabric{kind}", "AcceleratedOptimizer")  # of checkpoints from before wrappers were removed
    if saved_kind not in (kind, *wrapped):
        return [f"is {saved_kind} in the checkpoint, {kind} here"]
    sizes = list(map(len, groups))
    saved_sizes = list(map(len, saved_groups))
    if sizes != saved_sizes:
        return [f"has groups of {saved_sizes} tensors in the checkpoint, of {sizes} here"]
    found = []
    for index, (group, saved_group) in enumerate(zip(groups, saved_groups, strict=True)):
        for i, (shape, saved) in enumerate(zip(group, saved_group, strict=True)):
            if shape != saved:
                found.append(f"has tensor {i} of group {index} of shape {saved} in the checkpoint, {shape} here")
    return found


# Different saved tensors for the same memory: the last one loaded would win.


def _explain_conflicts(objects: ByName, states: ByName) -> list[str]:
    """List saved tensors that differ but would be loaded into the same memory."""
    found = []
    firsts: dict[Any, tuple[str, Tensor]] = {}  # by their storage here
    for name, target in objects.items():
        state = module_state(target) if isinstance(target, nn.Module) else {}
        for key, here in state.items():
            there = states[name][key]
            if not is_ordinary(here) or there.is_meta:
                continue
            path = path_to(name, key)
            other, saved = firsts.setdefault(storage_key(here), (path, there))
            if saved is not there and digest(saved) != digest(there):
                problem = f"{other} and {path} differ in the checkpoint, but share memory here"
                found.append(f"{problem}: untie them, or load equal ones")
    return found
