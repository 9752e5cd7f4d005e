"""Recognises tensors of which each rank holds only a part, which no function of this library can handle yet."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from ..torch_internals import is_sharded

_NAMED = 3  # tensors that a message names


def explain_sharded(call: str, tensors: Iterable[tuple[str, Any]]) -> str:
    """Say why `call` refuses these named tensors; "" if none of them is sharded."""
    found = [name for name, tensor in tensors if is_sharded(tensor)]
    if not found:
        return ""
    names = ", ".join(found[:_NAMED])
    if len(found) > _NAMED:
        names += f" and {len(found) - _NAMED} more"
    return (
        f"{call} does not handle sharded tensors (fully_shard, FSDP, tensor parallelism), but {names} is one: "
        "each rank holds only its own part. Use torch.distributed.checkpoint and torch's own functions for them, or "
        "pass tensor.full_tensor()."
    )


class UnshardedPickler(pickle.Pickler):
    """A pickler that refuses sharded tensors: what arrives elsewhere would be one rank's part."""

    def __init__(self, file: io.BytesIO, call: str) -> None:
        super().__init__(file)
        self.call = call

    def reducer_override(self, obj: Any) -> Any:
        """Refuse a sharded tensor; leave everything else to pickle."""
        if isinstance(obj, Tensor) and is_sharded(obj):
            raise TypeError(explain_sharded(self.call, [("a tensor in the value", obj)]))
        return NotImplemented
