"""Loading of a checkpoint: every rank reads it, and nothing is changed unless it fits on all of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

from torch.optim import Optimizer

from ..collectives.differences import list_lines
from ..data.seeds import check_rng_state, set_rng_states
from ..errors import CheckpointError
from ..job.lifecycle import exchange
from ..launch.ranks import get_rank, get_world_size, is_main_process
from ..parallel.lr_scaling import applied_scales
from ..parallel.models import unwrap_model
from ..torch_internals import is_dtensor
from .files import FORMAT_WITH_PIECES, explain_unusable, read, unreadable
from .fit import explain_misfits
from .saving import try_on_all
from .states import sharding, state_for, tensors_of

_log = logging.getLogger(__name__)
_UNDEFINED = (
    "The objects are in an undefined state on every rank, some of them loaded: load a checkpoint "
    "that fits them, or create them again, before going on."
)


def load_first(
    folder: Path,
    candidates: Callable[[Path], list[str]],
    objects: Mapping[str, Any],
) -> dict[str, Any] | None:
    """Load the first checkpoint that can be read. Collective.

    Args:
        folder: The folder of the checkpoints.
        candidates: Names those in a folder that may be taken, the first to try in front.
        objects: The objects to restore, by name.

    Returns:
        The rest of its content; None if there is no candidate.

    Raises:
        CheckpointError: On every rank, if there are candidates and none can be read, or the one
            that can does not fit.
    """
    reasons: dict[str, str] = {}  # why those that were tried cannot be read

    def choose() -> str:
        if is_main_process():
            for name in candidates(folder):  # anew, for a job beside this one may save and delete
                if name not in reasons:
                    return name
        return ""

    while name := exchange(try_on_all(choose))[0]:
        try:
            content, sharded = _read_on_all(folder / name, objects)
        except CheckpointError as error:  # the same on every rank
            if is_main_process():
                _log.warning("%s Trying the checkpoint before it.", error)
            reasons[name] = f"\n  {error}"
            continue
        return _restore(folder / name, content, sharded, objects)
    if reasons:
        texts = "".join(reasons.values())
        raise CheckpointError(f"No checkpoint in {folder} can be read:{texts}")
    return None


def load_file(path: Path, objects: Mapping[str, Any]) -> dict[str, Any]:
    """Load one checkpoint, and return what is not restored into an object. Collective.

    Raises:
        CheckpointError: On every rank, if one cannot read it, or it does not fit.
    """
    content, sharded = _read_on_all(path, objects)
    return _restore(path, content, sharded, objects)


def _read_on_all(path: Path, objects: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    """Return the content of a file that every rank reads. Collective.

    Args:
        path: The file.
        objects: The objects to restore, by name.

    Returns:
        The content, and what reads its sharded tensors, or loads into sharded objects: None if
        there are neither.

    Raises:
        CheckpointError: On every rank, if one cannot read it, or it is no checkpoint that could be
            restored.
    """
    tensors = [tensor for name, value in objects.items() for _, tensor in tensors_of(name, value)]
    is_sharded = any(map(is_dtensor, tensors))
    with ExitStack() as stack:
        # held open, for it may be deleted before all have read it
        file = try_on_all(lambda: stack.enter_context(_open(path)))
        content, digest = try_on_all(lambda: _read(path, file, objects, is_sharded), doing=f"Cannot read {path}: ")
    files = len(set(exchange(digest)))
    if files > 1:
        raise CheckpointError(f"The ranks see {files} different files at {path}. They must share the folder.")
    has_pieces = content["format"] == FORMAT_WITH_PIECES
    if not has_pieces and not is_sharded:
        return content, None
    pieces = try_on_all(lambda: sharding().SavedPieces(path, content))
    if has_pieces:
        try_on_all(pieces.verify)
    return content, pieces


def _open(path: Path) -> BinaryIO:
    try:
        return open(path, "rb")
    except (OSError, ValueError) as error:  # the second for a name with a null character
        raise unreadable(path, error) from error


def _read(
    path: Path,
    file: BinaryIO,
    objects: Mapping[str, Any],
    is_mapped: bool,
) -> tuple[dict[str, Any], str]:
    content, digest = read(file, is_mapped)
    problem = explain_unusable(content)
    if not problem and objects:
        states = content["rng"]
        # where there is none of this rank, new ones are derived from rank 0's
        state = states[get_rank()] if get_rank() < len(states) else states[0]
        try:
            check_rng_state(state)
        except ValueError as error:
            problem = f"{error}; load(path) without objects still reads the rest"
    if problem:
        raise CheckpointError(f"Cannot read {path}: {problem}.")
    return content, digest


def _restore(path: Path, content: dict[str, Any], sharded: Any, objects: Mapping[str, Any]) -> dict[str, Any]:
    """Load a checkpoint's content into objects, if it fits them on all ranks. Collective.

    Returns:
        The rest of its content.
    """
    states = try_on_all(
        lambda: _fitting_states(path, content, sharded, objects),
        doing=f"{path} does not fit; nothing was loaded: ",
    )
    rest = {name: state for name, state in states.items() if name not in objects}
    if objects:
        try:
            try_on_all(lambda: _load_into_all(objects, states, sharded, content["rng"]))
        except CheckpointError as error:
            raise CheckpointError(f"Cannot load {path}: {error}\n{_UNDEFINED}") from error
    elif sharded is not None:
        rest = try_on_all(lambda: {name: sharded.fill(state) for name, state in rest.items()})
    result = {"step": content["step"]}
    if content.get("score") is not None:
        result["score"] = content["score"]
    return result | rest


def _fitting_states(
    path: Path,
    content: Mapping[str, Any],
    sharded: Any,
    objects: Mapping[str, Any],
) -> dict[str, Any]:
    """Return this rank's states by name; raise if those asked for are not there or do not fit."""
    own = _part_of_this_rank(path, content)
    states = {**content["state"], **own.get("per_rank", {})}
    kinds = {**content["kinds"], **own.get("kinds", {})}
    shapes = {**content["shapes"], **own.get("shapes", {})}
    problems = explain_misfits(objects, states, kinds, shapes)
    if not problems and sharded is not None:
        problems = sharded.explain_losses(objects, states)
    if problems:
        headline = f"{path} does not fit; nothing was loaded:"
        raise CheckpointError(list_lines(headline, problems))
    return states


def _part_of_this_rank(path: Path, content: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a checkpoint holds of this rank alone; {} if it holds nothing of each."""
    parts: list[dict[str, Any]] = content.get("per_rank") or []
    if not parts:
        return {}
    if len(parts) != get_world_size():
        names = ", ".join(parts[0]["per_rank"])
        raise CheckpointError(
            f"{path} holds {names} of each of {len(parts)} ranks, and this job has "
            f"{get_world_size()}. Run on {len(parts)} ranks, or read it with "
            'torch.load(path)["per_rank"].'
        )
    return parts[get_rank()]


def _load_into_all(
    objects: Mapping[str, Any],
    states: Mapping[str, Any],
    sharded: Any,
    rng_states: list[dict[str, Any]],
) -> None:
    """Load states into objects that they fit, and set the random number generators."""
    for name, target in objects.items():
        former = []
        if isinstance(target, Optimizer):
            former = applied_scales(target)
        state = state_for(target, states[name])
        if sharded is not None:
            state = sharded.spread(target, state)
        unwrap_model(target).load_state_dict(state)
        if former and is_main_process():
            _warn_of_scales(name, former, applied_scales(target))
    set_rng_states(rng_states)


def _warn_of_scales(name: str, here: list[Any], saved: list[Any]) -> None:
    """Warn if an optimizer's learning rates were saved with another global batch."""
    for old, new in zip(saved, here, strict=True):
        if old is not None and new is not None and old != new:
            _log.warning(
                "The learning rates of %s were scaled by %g when it was saved, and by %g here: the saved ones are "
                "back. If the global batch is another one now, multiply each group's lr, and base_lrs of its "
                "scheduler, by %g.",
                name,
                old,
                new,
                new / old,
            )
            return
