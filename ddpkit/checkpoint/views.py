"""`torch.save` that writes of a view its own elements, not the whole tensor that it was cut from."""

from __future__ import annotations

import io
import pickle
from collections import Counter, defaultdict
from types import SimpleNamespace
from typing import IO, Any

import torch
from torch import Tensor, nn

from ..collectives.pickling import reduce_to_own_elements
from ..collectives.tensors import is_dense
from ..parallel.models import sharing_memory
from ..torch_internals import storage_address


def save(content: Any, file: IO[bytes]) -> None:
    """Save like `torch.save`, for `torch.load` to read, but leave out memory that is not shown.

    Tensors that overlap keep their memory, so that they share it again when they are loaded.
    """
    torch.save(content, file, pickle_module=_module_with(pickler_for(content)))


def save_without_tensors(content: Any, file: IO[bytes]) -> None:
    """Save like `torch.save`, with something empty in the place of each tensor: to try what is left."""
    torch.save(content, file, pickle_module=_module_with(_TensorlessPickler))


def pickler_for(content: Any) -> type[pickle.Pickler]:
    """Make a class of pickler that writes of the views in a content their own elements only."""
    survey = _Survey()
    survey.dump(content)
    to_cut = survey.storages_to_cut()

    class Pickler(pickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            if not _is_plain(obj) or _address(obj) not in to_cut:
                return NotImplemented
            return reduce_to_own_elements(obj)

    return Pickler


class _Survey(pickle.Pickler):
    """Find the tensors of a content, and how often each storage is written, however it is held."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO(), pickle.DEFAULT_PROTOCOL)
        self.tensors: dict[int, list[Tensor]] = defaultdict(list)  # plain ones, by storage
        self.uses: Counter[int] = Counter()  # by storage

    def reducer_override(self, obj: Any) -> Any:
        if _is_plain(obj):
            self.tensors[_address(obj)].append(obj)
        return NotImplemented

    def persistent_id(self, obj: Any) -> str | None:
        address = storage_address(obj)
        if address is None:
            return None
        self.uses[address] += 1
        return "a storage"

    def storages_to_cut(self) -> set[int]:
        """Find the storages, by address, of which plain tensors alone show parts that are apart."""
        to_cut = set()
        for address, tensors in self.tensors.items():
            if self.uses[address] == len(tensors) and _are_apart(tensors):
                to_cut.add(address)
        return to_cut


def _is_plain(obj: Any) -> bool:
    """Return whether a value is a tensor that a copy of its elements can stand for.

    A Parameter is asked for again, by its data; attributes would be lost.
    """
    return type(obj) is Tensor and is_dense(obj) and not vars(obj)


def _are_apart(tensors: list[Tensor]) -> bool:
    """Return whether tensors of one storage do not overlap and are smaller than it, together."""
    size = sum(tensor.nbytes for tensor in tensors)
    return size < tensors[0].untyped_storage().nbytes() and not sharing_memory(tensors)


class _TensorlessPickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if type(obj) not in (Tensor, nn.Parameter) or vars(obj):
            return NotImplemented
        return torch.Size, ((),)  # which may be a key, as a tensor may


def _module_with(pickler: type[pickle.Pickler]) -> Any:
    """Make what `torch.save` takes for a module like `pickle`, with a class of pickler."""
    return SimpleNamespace(__name__="pickle", Pickler=pickler)  # all that torch.save looks at


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
