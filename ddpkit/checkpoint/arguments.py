"""Checks of the arguments of a `Checkpointer`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..collectives.sharded import explain_sharded
from ..errors import CheckpointError
from ..parallel.models import without_dtensors
from .leaves import has_names, tensors_of
from .states import is_fsdp

_RESERVED = ("step", "score")  # in what load() returns: the checkpoint's own


def as_path(path: str | os.PathLike[str]) -> Path:
    """Return a path that means the same after the script has changed its directory; `~` is the home folder.

    Raises:
        ValueError: If nobody's home folder has that name.
    """
    try:
        return Path(path).expanduser().absolute()
    except RuntimeError as error:
        raise ValueError(f"{path} begins with a home folder that is not known: {error}") from None


def as_named_values(values: Any) -> dict[str, Any]:
    """Convert `per_rank` to a dict.

    Raises:
        TypeError: If it is no mapping from names.
        ValueError: If a name is one of the checkpoint's own.
    """
    if not has_names(values):
        raise TypeError(f"per_rank must be a dict of values by name, got {values!r}.")
    reserved = [name for name in values if name in _RESERVED]
    if reserved:
        raise ValueError(
            f"per_rank cannot hold {', '.join(reserved)}: under the names {', '.join(_RESERVED)} "
            "load() returns what is the checkpoint's own. Choose others."
        )
    return dict(values)


def as_bool(value: Any, name: str) -> bool:
    """Return a value that is True or False.

    Raises:
        TypeError: If it is anything else.
    """
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}.")
    return value


def check_disjoint(own: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Raise ValueError if a name stands in `per_rank` and among the states of all ranks."""
    both = sorted(own.keys() & state.keys())
    if both:
        raise ValueError(f"Passed twice, in per_rank and as keyword: {', '.join(both)}. Pass each once.")


def check_loadable(objects: Mapping[str, Any]) -> None:
    """Raise TypeError if an object takes no state."""
    for name, target in objects.items():
        if not hasattr(target, "load_state_dict") or not hasattr(target, "state_dict"):
            problem = f"{name}={target!r} has no load_state_dict()."
            raise TypeError(f"{problem} Plain data comes back in the returned dict.")


def check_tensors(call: str, values: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raise CheckpointError if a tensor is spread over the ranks in a way that cannot be saved or loaded.

    Args:
        call: The call, for messages.
        values: Objects and values of the job, by name; they may hold DTensors.
        own: Those that each rank has its own of, by name; they may not.
    """
    tensors = without_dtensors(_tensors_of_all(values))
    tensors += _tensors_of_all(own)
    problem = explain_sharded(call, tensors)
    if problem:
        raise CheckpointError(problem)
    wrapped = [name for name, value in {**values, **own}.items() if is_fsdp(value)]
    if wrapped:
        raise CheckpointError(
            f"{call} does not handle sharded tensors, but {', '.join(wrapped)} is wrapped in FSDP: "
            "each rank holds only its own part. Use fully_shard, or torch.distributed.checkpoint."
        )


def _tensors_of_all(values: Mapping[str, Any]) -> list[tuple[str, Any]]:
    tensors: list[tuple[str, Any]] = []
    for name, value in values.items():
        tensors.extend(tensors_of(name, value))
    return tensors
