"""Nested states: their tensors, and a digest of each leaf by its path."""

from __future__ import annotations

import io
import pickle
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import IO, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..collectives.digest import digest
from ..collectives.transfer import reduce_to_own_elements
from ..collectives.tree import is_dense, name_dtype
from ..parallel.models import sharing_memory
from ..torch_internals import storage_address


def tensors_of(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Go through the tensors of an object or nested value, without asking for its state dict."""
    if isinstance(value, nn.Module):
        for inner, tensor in (*value.named_parameters(), *value.named_buffers()):
            yield f"{name}.{inner}", tensor
    elif isinstance(value, Optimizer):
        yield from tensors_of(f"{name}.param_groups", value.param_groups)
        yield from tensors_of(f"{name}.state", list(value.state.values()))
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from tensors_of(f"{name}.{key}", inner)
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from tensors_of(f"{name}.{number}", inner)
    elif isinstance(value, Tensor):
        yield name, value


def digest_leaves(name: str, state: Any) -> dict[str, str]:
    """Digest each leaf of a nested state, by path.

    Digests are equal if the leaves are, and others if one bit is. Containers have one, too, of
    their class and length.
    """
    if isinstance(state, Mapping):
        items = list(state.items())
    elif isinstance(state, list | tuple):
        items = list(enumerate(state))
    else:
        return {name: digest(state)}
    digests = {name: f"{type(state).__name__} of {len(state)}"}
    for key, value in items:
        digests.update(digest_leaves(path_to(name, key), value))
    return digests


def has_names(value: Any) -> bool:
    """Return whether a value is a mapping from names."""
    return isinstance(value, Mapping) and all(isinstance(name, str) for name in value)


def path_to(container: str, key: Any) -> str:
    """Write the path of a container's value under a key, as no other key or nesting is written."""
    if type(key) is str and key.isidentifier():
        return f"{container}.{key}"
    return f"{container}[{key!r}]"


# Saved tensors whose values another dtype cannot hold: loading would change them silently.


def explain_loss(name: str, saved: Tensor, dtype: torch.dtype) -> str:
    """Say that loading a tensor as this dtype would change it by more than rounding; "" if not.

    Nothing is said of one on the meta device, whose values are not known yet.
    """
    if saved.dtype == dtype or saved.is_meta or _holds(dtype, saved):
        return ""
    there = name_dtype(saved.dtype)
    return f"has {name} of {there} there, of {name_dtype(dtype)} here, which does not hold its values"


def _holds(dtype: torch.dtype, saved: Tensor) -> bool:
    """Return whether a tensor keeps its values in another dtype.

    Numbers that are not integers may be rounded.
    """
    if saved.is_complex() and not dtype.is_complex:
        return False
    converted = saved.to(dtype)
    if dtype.is_complex and not saved.is_complex():
        converted = converted.real
    if _has_fractions(saved.dtype) and _has_fractions(dtype):
        return _is_rounded(converted, saved)
    if not torch.equal(converted.to(saved.dtype), saved):
        return False
    return _has_negative(converted) == _has_negative(saved)


def _has_fractions(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _is_rounded(converted: Tensor, saved: Tensor) -> bool:
    """Return whether a tensor is a saved one but for rounding, and the smallest numbers, now 0."""
    limits = torch.finfo(converted.dtype)
    if limits.max >= torch.finfo(saved.dtype).max:
        return True
    if saved.itemsize == 1:  # torch does not compare floats of 8 bits
        saved = saved.float()
    back = converted.to(saved.dtype)  # larger numbers became infinite, NaN, or the largest
    smallest = limits.smallest_normal
    return torch.allclose(back, saved, rtol=limits.eps, atol=smallest, equal_nan=True)


def _has_negative(tensor: Tensor) -> bool:
    return tensor.dtype.is_signed and bool((tensor < 0).any())


# `torch.save` that writes of a view its own elements, not the whole tensor that it was cut from.


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
