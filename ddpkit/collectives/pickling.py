"""Pickle values for other ranks: tensors of any dtype, without the memory around a view, and never one rank's shard."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..process_group.failures import describe_error
from ..torch_internals import has_no_memory, is_sharded
from .sharded import explain_sharded
from .tensors import flat_bytes, is_dense

_OF_A_CLASS = b"\x93"  # in a pickle that holds more than plain data: pickle.STACK_GLOBAL


class UnshardedPickler(pickle.Pickler):
    """Pickle anything but sharded tensors: what arrives elsewhere would be one rank's part."""

    def __init__(self, file: io.BytesIO, call: str) -> None:
        super().__init__(file)
        self.call = call

    def reducer_override(self, obj: Any) -> Any:
        """Refuse a sharded tensor; leave everything else to pickle."""
        if isinstance(obj, Tensor) and is_sharded(obj):
            raise TypeError(explain_sharded(self.call, [("a tensor in the value", obj)]))
        return NotImplemented


class CompactPickler(UnshardedPickler):
    """Pickle of a view its own elements only, for which torch writes all of its storage, and any dtype."""

    def reducer_override(self, obj: Any) -> Any:
        """Write a dense tensor in its own way where torch's is too large, or missing."""
        super().reducer_override(obj)
        if type(obj) is not Tensor or not is_dense(obj):
            return NotImplemented
        if not _can_be_pickled(obj.dtype):
            copy = flat_bytes(obj).cpu().clone()
            return _from_bytes, (copy, obj.dtype, tuple(obj.shape), obj.device, obj.requires_grad)
        if obj.untyped_storage().nbytes() <= obj.nbytes and not has_no_memory(obj):
            return NotImplemented
        return reduce_to_own_elements(obj)


class TensorPickler(CompactPickler):
    """Leave the tensors out of a pickle, in a list of their own, so that they can travel by themselves."""

    def __init__(self, file: io.BytesIO, call: str, tensors: list[Tensor]) -> None:
        super().__init__(file, call)
        self.tensors = tensors
        self.indices: dict[int, int] = {}  # in the list, by id

    def persistent_id(self, obj: Any) -> int | None:
        """Give a dense tensor its index in the list."""
        if type(obj) is not Tensor or not is_dense(obj):  # a Parameter is asked for again by its data
            return None
        if id(obj) not in self.indices:
            self.indices[id(obj)] = len(self.tensors)
            self.tensors.append(obj)  # keeps it alive, and with it its id
        return self.indices[id(obj)]


class TensorUnpickler(pickle.Unpickler):
    """Read what `TensorPickler` wrote, given the tensors that it left out."""

    def __init__(self, file: io.BytesIO, tensors: list[Tensor]) -> None:
        super().__init__(file)
        self.tensors = tensors

    def persistent_load(self, index: int) -> Tensor:
        """Find a tensor by its index in the list."""
        return self.tensors[index]


def reduce_to_own_elements(tensor: Tensor) -> Any:
    """Return what pickle asks of a dense tensor, for its own elements: torch writes all of a view's storage."""
    copy: Any = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    return copy.__reduce_ex__(2)


def check_copies(call: str, data: bytes, load: Callable[[bytes], object]) -> None:
    """Raise if a value that was pickled cannot be unpickled, before others try to and part ways."""
    if _OF_A_CLASS not in data:
        return
    try:
        load(data)
    except Exception as error:
        raise TypeError(
            f"{call} sends copies, and this value can be pickled but not unpickled: {describe_error(error)}"
        ) from error


@lru_cache
def _can_be_pickled(dtype: torch.dtype) -> bool:
    """Return whether torch pickles tensors of a dtype; its youngest ones it does not."""
    try:
        pickle.loads(pickle.dumps(torch.empty(0, dtype=dtype, device="cpu")))
    except Exception:
        return False
    return True


def _from_bytes(
    data: Tensor, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device, requires_grad: bool
) -> Tensor:
    """Make a tensor that was pickled as its bytes."""
    return data.view(dtype).reshape(shape).to(device).requires_grad_(requires_grad)
