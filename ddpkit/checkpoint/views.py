"""`torch.save` that writes of a view its own elements, not the whole tensor that it was cut from."""

from __future__ import annotations

import pickle
from collections import defaultdict
from typing import IO, Any

import torch
from torch import Tensor

from ..collectives.tensors import is_dense
from ..parallel.models import sharing_memory
from .leaves import tensors_of


def save(content: Any, file: IO[bytes]) -> None:
    """Save like `torch.save`, for `torch.load` to read, but leave out memory that is not shown.

    Tensors that overlap keep their memory, so that they share it again when they are loaded.
    """
    torch.save(content, file, pickle_module=_pickle_module(_storages_to_cut(content)))


def _storages_to_cut(content: Any) -> set[int]:
    """Find the storages, by address, of which the content shows parts that do not overlap."""
    tensors: dict[int, dict[int, Tensor]] = defaultdict(dict)
    for _, tensor in tensors_of("content", content):
        if is_dense(tensor):
            tensors[_address(tensor)][id(tensor)] = tensor
    return {address for address, parts in tensors.items() if _are_apart([*parts.values()])}


def _are_apart(tensors: list[Tensor]) -> bool:
    """Return whether tensors of one storage do not overlap and are smaller than it, together."""
    size = sum(tensor.nbytes for tensor in tensors)
    return size < tensors[0].untyped_storage().nbytes() and not sharing_memory(tensors)


def _pickle_module(to_cut: set[int]) -> Any:
    """Make what `torch.save` takes for a module like `pickle`: the class of its pickler."""

    class Pickler(pickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            # a Parameter is asked for again, by its data
            if type(obj) is not Tensor or not is_dense(obj) or _address(obj) not in to_cut:
                return NotImplemented
            copy: Any = obj.detach().clone().requires_grad_(obj.requires_grad)
            return copy.__reduce_ex__(pickle.DEFAULT_PROTOCOL)

    return type("views", (), {"Pickler": Pickler})


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
