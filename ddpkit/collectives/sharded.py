"""Refuse tensors of which each rank holds only a part, in calls that need all of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..torch_internals import is_sharded
from .differences import first_of

_TENSORS_NAMED = 3  # tensors that a message names


def explain_sharded(call: str, tensors: Iterable[tuple[str, Any]]) -> str:
    """Say why `call` refuses these named tensors; "" if none of them is sharded."""
    sharded = [name for name, tensor in tensors if is_sharded(tensor)]
    if not sharded:
        return ""
    names = ", ".join(first_of(sharded, _TENSORS_NAMED))
    return (
        f"{call} does not handle sharded tensors (fully_shard, FSDP, tensor parallelism), but these are: "
        f"{names}. Each rank holds only its own part. Use torch.distributed.checkpoint and torch's own functions for "
        "them, or pass tensor.full_tensor()."
    )
