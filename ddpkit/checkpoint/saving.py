"""The content of a new checkpoint, put together from the states of all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch.nn.parameter import is_lazy

from ..collectives.ops import all_gather_object
from ..collectives.sharded import explain_sharded
from ..errors import CheckpointError
from ..launch.ranks import get_rank, is_main_process
from ..parallel.models import without_dtensors
from ..process_group import current_job
from ..seeding.generator_states import get_rng_state
from .all_or_none import try_on_all
from .files import from_bytes, to_bytes
from .format import FORMAT, FORMAT_WITH_PIECES
from .leaves import tensors_of
from .sharded import Layout, Pieces, as_plain, lay_out, own_pieces, take_out
from .sharded import describe as describe_pieces
from .states import describe, is_consolidated, state_of


class Collected(NamedTuple):
    """What the ranks write for a checkpoint.

    Attributes:
        content: For rank 0 to write.
        sharded: The sharded tensors in it, of which the content has the shapes only, by path.
        layouts: Where in the files of all ranks their pieces are to be.
        pieces: Those that this rank writes.
    """

    content: dict[str, Any]
    sharded: dict[str, Any]
    layouts: dict[str, Layout]
    pieces: Pieces


def collect_content(
    step: int,
    score: float | None,
    values: Mapping[str, Any],
    own: Mapping[str, Any],
) -> Collected:
    """Put together the content of a checkpoint. Collective.

    Whether the ranks' states are equal is not looked at.

    Args:
        step: Optimiser steps done.
        score: How good the checkpoint is, if known.
        values: The objects and values of which rank 0's are saved, by name.
        own: Those of which each rank's are saved, by name.

    Raises:
        CheckpointError: On every rank, if some states cannot be saved.
    """
    _consolidate(values)
    sharded: dict[str, Any] = {}
    content, part = try_on_all(lambda: _take_states(step, score, values, own, sharded))
    parts = [from_bytes(data) for data in all_gather_object(part)]
    content["rng"] = [each.pop("rng") for each in parts]
    layouts = lay_out([each.pop("sharded") for each in parts])  # the same on every rank
    if own:
        content["per_rank"] = parts
    if layouts:
        content["format"] = FORMAT_WITH_PIECES
        content["sharded"] = {"tensors": as_plain(layouts)}  # and their folder, when it is known
    return Collected(content, sharded, layouts, own_pieces(sharded, layouts, get_rank()))


def _consolidate(values: Mapping[str, Any]) -> None:
    """Have optimizers that spread their state over ranks collect it on rank 0. Collective."""
    for value in values.values():
        if is_consolidated(value):
            with current_job.exchanging():
                value.consolidate_state_dict(to=0)


def _take_states(
    step: int,
    score: float | None,
    values: Mapping[str, Any],
    own: Mapping[str, Any],
    sharded: dict[str, Any],
) -> tuple[dict[str, Any], bytes]:
    """Return the content as far as it is rank 0's, and this rank's part of the rest.

    Args:
        step: Optimiser steps done.
        score: How good the checkpoint is, if known.
        values: The objects and values of which rank 0's are saved, by name.
        own: Those of which each rank's are saved, by name.
        sharded: Gets the sharded tensors among the states, by path.
    """
    states = {}
    for name, value in values.items():
        if is_main_process() or not is_consolidated(value):
            states[name] = state_of(value)
    own_states = {name: state_of(value) for name, value in own.items()}
    _check_tensors(states, own_states)
    states = {name: take_out(name, state, sharded) for name, state in states.items()}
    own_states = take_out("per_rank", own_states, {})  # in which none are sharded
    kinds, shapes = _describe_all(values)
    content = {
        "format": FORMAT,
        "step": step,
        "score": score,
        "state": states,
        "kinds": kinds,
        "shapes": shapes,
    }
    own_kinds, own_shapes = _describe_all(own)
    part = {
        "rng": get_rng_state(),
        "per_rank": own_states,
        "kinds": own_kinds,
        "shapes": own_shapes,
        "sharded": describe_pieces(sharded),
    }
    _check_readable(own_states)
    return content, to_bytes(part)


def _check_tensors(states: Mapping[str, Any], own_states: Mapping[str, Any]) -> None:
    """Raise if a tensor that only a state shows is sharded in a way that cannot be saved, or if one has no values."""
    of_all = list(tensors_of("state", states))
    of_each = list(tensors_of("per_rank", own_states))
    tensors = [*of_all, *of_each]
    problem = explain_sharded("Checkpointer.save", [*without_dtensors(of_all), *of_each])
    if problem:
        raise CheckpointError(problem)
    for name, tensor in tensors:
        if is_lazy(tensor):
            problem = f"Cannot save {name}: it is lazy and not initialised yet."
            raise CheckpointError(f"{problem} Call the model once before.")
        if tensor.is_meta:
            problem = f"Cannot save {name}: it is on the meta device and has no values."
            raise CheckpointError(f"{problem} Make it with some.")


def _describe_all(values: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the classes of those values that have one that matters, and the shapes of all."""
    kinds = {}
    shapes = {}
    for name, value in values.items():
        kind, shapes[name] = describe(value)
        if kind:
            kinds[name] = kind
    return kinds, shapes


def _check_readable(own_states: Mapping[str, Any]) -> None:
    """Raise if a state of this rank alone cannot be read without code from the file."""
    for name, state in own_states.items():
        try:
            from_bytes(to_bytes(state))
        except Exception as error:
            raise CheckpointError(f"Cannot save per_rank[{name!r}]: {error}") from error
