"""The content of a new checkpoint, put together from the states of all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..collectives.ops import all_gather_object
from ..collectives.sharded import explain_sharded
from ..errors import CheckpointError
from ..launch.ranks import is_main_process
from ..process_group import lifecycle
from ..seeding.generator_states import get_rng_state
from .all_or_none import try_on_all
from .files import from_bytes, to_bytes
from .format import FORMAT
from .leaves import tensors_of
from .states import describe, is_consolidated, state_of


def collect_content(
    step: int,
    score: float | None,
    values: Mapping[str, Any],
    own: Mapping[str, Any],
) -> dict[str, Any]:
    """Put together the content of a checkpoint, for rank 0 to write. Collective.

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
    content, part = try_on_all(lambda: _take_states(step, score, values, own))
    parts = [from_bytes(data) for data in all_gather_object(part)]
    content["rng"] = [each.pop("rng") for each in parts]
    if own:
        content["per_rank"] = parts
    return content


def _consolidate(values: Mapping[str, Any]) -> None:
    """Have optimizers that spread their state over ranks collect it on rank 0. Collective."""
    for value in values.values():
        if is_consolidated(value):
            with lifecycle.peer_errors():
                value.consolidate_state_dict(to=0)


def _take_states(
    step: int,
    score: float | None,
    values: Mapping[str, Any],
    own: Mapping[str, Any],
) -> tuple[dict[str, Any], bytes]:
    """Return the content as far as it is rank 0's, and this rank's part of the rest."""
    states = {}
    for name, value in values.items():
        if is_main_process() or not is_consolidated(value):
            states[name] = state_of(value)
    own_states = {name: state_of(value) for name, value in own.items()}
    _check_tensors(states, own_states)
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
    }
    _check_readable(own_states)
    return content, to_bytes(part)


def _check_tensors(states: Mapping[str, Any], own_states: Mapping[str, Any]) -> None:
    """Raise if a tensor that only a state shows is sharded, or if one has no values."""
    tensors = [*tensors_of("state", states), *tensors_of("per_rank", own_states)]
    problem = explain_sharded("Checkpointer.save", tensors)
    if problem:
        raise CheckpointError(problem)
    for name, tensor in tensors:
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
