"""The form of a checkpoint file's content, and its check: a file may hold anything."""

from __future__ import annotations

from types import NoneType
from typing import Any

import torch

from ..launch.ranks import get_rank
from ..seeding.generator_states import check_rng_state
from .leaves import has_names

FORMAT = 1
FORMAT_WITH_PIECES = 2  # of a checkpoint with sharded tensors, whose pieces are in a folder beside it


def explain_unusable(content: Any, with_random_states: bool) -> str:
    """Say why a file's content cannot be used; "" if it has the form that `save()` gives it.

    Args:
        content: The data, of any kind.
        with_random_states: Whether this rank means to set its random number generators from it.
    """
    if not isinstance(content, dict):
        return f"it holds a {type(content).__name__}, which no Checkpointer wrote"
    version = content.get("format")
    if type(version) is not int or version not in (FORMAT, FORMAT_WITH_PIECES):
        return f"its format is {version}, this ddpkit reads {FORMAT} and {FORMAT_WITH_PIECES}"
    is_right = {
        "step": _is_step(content.get("step")),
        "score": type(content.get("score")) in (float, NoneType),
        "state": has_names(content.get("state")),
        "kinds": _are_kinds(content.get("kinds")),
        "shapes": _are_shapes(content.get("shapes")),
        "rng": _are_random_states(content.get("rng")),
        "per_rank": _are_parts(content.get("per_rank")),
        "sharded": version == FORMAT or _is_sharded(content.get("sharded")),
    }
    wrong = [name for name, right in is_right.items() if not right]
    if wrong:
        return f"its {', '.join(wrong)} is missing or not what a Checkpointer writes"
    if with_random_states:
        return _explain_random_states(content["rng"])
    return ""


def _is_step(value: Any) -> bool:
    return type(value) is int and value >= 0  # a bool is none


def _are_kinds(value: Any) -> bool:
    return has_names(value) and all(isinstance(kind, str) for kind in value.values())


def _are_shapes(value: Any) -> bool:
    if not has_names(value) or not all(isinstance(groups, list) for groups in value.values()):
        return False
    groups = [group for groups in value.values() for group in groups]
    return all(isinstance(group, list) and all(map(_are_counts, group)) for group in groups)


def _are_random_states(value: Any) -> bool:
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(state, dict) for state in value)


def _are_parts(value: Any) -> bool:
    if value is None:
        return True
    return isinstance(value, list) and all(_is_part(part) for part in value)


def _is_part(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    if not _are_kinds(value.get("kinds")):
        return False
    return has_names(value.get("per_rank")) and _are_shapes(value.get("shapes"))


def _is_sharded(value: Any) -> bool:
    if not has_names(value) or not has_names(value.get("tensors")):
        return False
    layouts = value["tensors"].values()
    return isinstance(value.get("folder"), str) and all(_is_layout(layout) for layout in layouts)


def _is_layout(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("dtype"), torch.dtype):
        return False
    shape, pieces = value.get("shape"), value.get("pieces")
    if not isinstance(shape, list) or not _are_counts(shape) or not isinstance(pieces, list):
        return False
    return all(_is_piece(piece, len(shape)) for piece in pieces)


def _is_piece(value: Any, dimensions: int) -> bool:
    if not isinstance(value, list) or len(value) != 4:
        return False
    offsets, sizes, file, start = value
    if not _are_counts(offsets) or not _are_counts(sizes) or not _are_counts([file, start]):
        return False
    return len(offsets) == len(sizes) == dimensions


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(number) is int and number >= 0 for number in value)


def _explain_random_states(states: list[dict[str, Any]]) -> str:
    """Say why this rank cannot use the states of generators, given by rank; "" if it can."""
    rank = get_rank()
    if rank >= len(states):
        rank = 0  # whose states new ones are derived from
    try:
        check_rng_state(states[rank])
    except ValueError as error:
        return f"{error}; load(path) without objects still reads the rest"
    return ""
