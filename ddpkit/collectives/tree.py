"""Take nested values apart into a flat list of leaves, and put them together again, on this rank alone."""

from __future__ import annotations

import operator
from collections import Counter, OrderedDict, UserDict, UserList, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cached_property, lru_cache
from itertools import islice, pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ..torch_internals import has_no_memory, is_dtensor, is_sharded

# Tell which tensors are dense, read their bytes, and join them. Nothing here talks to other ranks.


def explain_not_dense(tensor: Tensor) -> str:
    """Say why a tensor's elements are not simply those in its memory; "" if they are."""
    kind = type(tensor)
    if kind not in (Tensor, nn.Parameter):
        if is_sharded(tensor):
            return "a sharded tensor (fully_shard, FSDP, tensor parallelism; pass tensor.full_tensor())"
        if kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ or nn.parameter.is_lazy(tensor):
            return f"{kind.__name__}, a kind of tensor whose memory does not show its values"
    if tensor.is_meta:
        return "a meta tensor, which has no values"
    if tensor.is_nested:
        return "a nested tensor (pass a dense one)"
    if tensor.layout != torch.strided:
        layout = str(tensor.layout).removeprefix("torch.")
        return f"a {layout} tensor (pass a dense one)"
    if tensor.is_quantized:
        return f"a {name_dtype(tensor.dtype)} tensor (pass tensor.dequantize())"
    return ""


def whole(tensor: Tensor) -> Tensor:
    """Return the whole tensor that a DTensor stands for if no rank lacks a part of it; any other as it is.

    Terms of a sum that its ranks hold (`Partial`) are added up. Collective then, over its mesh.
    """
    if not is_dtensor(tensor):
        return tensor
    placed: Any = tensor.detach()
    if any(placement.is_shard() for placement in placed.placements):
        return tensor
    found: Tensor = placed.full_tensor()
    return found


def local_part(tensor: Any) -> Tensor:
    """Return the part of a DTensor that is on this rank; any other tensor as it is."""
    part: Tensor = tensor.to_local() if is_dtensor(tensor) else tensor
    return part


def is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor's elements are those in its memory, one after the other or strided."""
    return not explain_not_dense(tensor)


def is_tensor(value: Any) -> bool:
    """Return whether a value is a tensor: what a walk through a tree of them stops at."""
    return isinstance(value, Tensor)


def loses_gradient(tensor: Tensor) -> bool:
    """Return whether a tensor is meant for a loss: computed with a gradient, and no scalar, which people only log."""
    return tensor.requires_grad and not tensor.is_leaf and tensor.numel() > 1 and torch.is_grad_enabled()


def flat_bytes(tensor: Tensor) -> Tensor:
    """View a dense tensor as bytes, row-major: its own memory if it is contiguous."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    if has_no_memory(plain):
        plain = plain.clone()
    flat = plain.contiguous().reshape(-1)
    if flat.stride() != (1,):  # one element, or none, is contiguous whatever its stride
        flat = flat.as_strided(flat.shape, (1,))
    return flat.view(torch.uint8)


def concatenate(tensors: list[Tensor]) -> Tensor:
    """Join tensors of one dtype, always in new memory. Under autocast, plain `torch.cat` refuses float64."""
    first = tensors[0]
    length = sum([tensor.size(0) for tensor in tensors])  # len(tensor) is Python code of torch's
    out = torch.empty((length, *first.shape[1:]), dtype=first.dtype, device=first.device)
    return torch.cat(tensors, out=out)


def name_dtype(dtype: torch.dtype) -> str:
    """Write a dtype without its module: `float32`."""
    return str(dtype).removeprefix("torch.")


def bytes_as_tensor(data: bytes) -> Tensor:
    """Copy bytes into a tensor."""
    return torch.from_numpy(np.frombuffer(data, np.uint8).copy())


_NATIVE_NAMES = ["bool", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8"]
_NATIVE = {np.dtype(name) for name in _NATIVE_NAMES}
_REAL = {torch.from_numpy(np.zeros(0, dtype)).dtype for dtype in _NATIVE} | {torch.bfloat16}
_NUMBERS = {float, int, bool, np.float64}
_TENSORS = {Tensor, nn.Parameter}
_DICTS = {dict, OrderedDict, defaultdict, Counter}  # their values are all there is to them
_BUILT_IN = (defaultdict, OrderedDict, dict, list, tuple, SimpleNamespace, object)


class Leaf(NamedTuple):
    """Describe a leaf, equal on all ranks if it can be combined. Python's int, float and bool are one kind: number.

    Where a value cannot be combined, `kind` says why.
    """

    kind: str
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = ()
    device: str = "cpu"

    @property
    def known(self) -> bool:
        """Return whether it can be combined at all; a str, for example, cannot."""
        return self.dtype is not None or self == NUMBER

    def __str__(self) -> str:
        if self.dtype is None:
            return self.kind
        text = f"{name_dtype(self.dtype)} {self.kind} of shape {tuple(self.shape)}"
        if self.device != "cpu":
            text += f" on {self.device}"
        return text


class Node(NamedTuple):
    """Describe a container: its kind, the names of its children (as `['loss']`, `[0]`, `.x`), and what they are."""

    kind: str
    names: tuple[str, ...]
    children: tuple[Any, ...]

    def __str__(self) -> str:
        return f"{self.kind} of {len(self.children)}"


class Parts(NamedTuple):
    """Hold a container taken apart. `problem` says why it cannot be put together again; "" if it can."""

    kind: str
    names: tuple[str, ...]
    children: list[Any]
    problem: str = ""


Spec = Leaf | Node
NUMBER = Leaf("number")


def flatten(value: Any, leaves: list[Any]) -> Spec:
    """Append the leaves of `value` to `leaves`, and return a description of everything else.

    Leaves are Python numbers, and tensors for all that has a dtype. The keys of a dict are visited in sorted order, so
    that two dicts filled in different order have the same spec. What is neither is not appended, and not `known`.
    """
    if type(value) in _NUMBERS:
        leaves.append(value)
        return NUMBER
    if isinstance(value, Tensor):
        return _flatten_tensor(value, leaves)
    if isinstance(value, (np.ndarray, np.generic)):
        return _flatten_array(value, leaves)
    parts = take_apart(value)
    if parts is None:
        return _flatten_other(value, leaves)
    if parts.problem:
        return Leaf(parts.problem)
    return Node(parts.kind, parts.names, _flatten_all(parts.children, leaves))


def unflatten(value: Any, leaves: Iterator[Any]) -> Any:
    """Copy `value` with these leaves, in the order that `flatten` gave; containers keep type and order."""
    if isinstance(value, np.float64):
        return np.float64(next(leaves))
    if isinstance(value, np.ndarray):
        return next(leaves).numpy()
    if isinstance(value, np.generic):
        return next(leaves).numpy()[()]
    if type(value) in _NUMBERS or isinstance(value, Tensor):
        return next(leaves)
    parts = take_apart(value)
    if parts is None:
        return next(leaves)
    return put_together(value, _unflatten_all(parts.children, leaves))


def walk(spec: Spec, path: str = "value") -> Iterator[tuple[str, Spec]]:
    """Yield every container and leaf with its path, as in `("value['loss']", Leaf(...))`, in the order of `flatten`."""
    yield path, spec
    if isinstance(spec, Node):
        for name, child in zip(spec.names, spec.children, strict=True):
            yield from walk(child, _child_path(path, spec.kind, name))


def _child_path(path: str, kind: str, name: str) -> str:
    """Write the path of a container's child as Python does."""
    if kind in ("dict", "list", "tuple"):
        return f"{path}[{name}]"
    return f"{path}.{name}"


def take_apart(value: Any) -> Parts | None:
    """Take a container apart; return None for a value that is none."""
    if isinstance(value, Enum):
        return None
    if isinstance(value, dict):
        return _take_dict_apart(value)
    if isinstance(value, (list, tuple)):
        return _take_sequence_apart(value)
    attributes = _attributes(value)
    if attributes is None:
        return None
    return _take_object_apart(value, attributes)


def put_together(value: Any, children: list[Any]) -> Any:
    """Copy a container that was taken apart, with these children. Code of its class, which may refuse, is not run."""
    if type(value) is list:
        return children
    if type(value) is dict:
        copy = value.copy()
        keys, _ = _sort_keys(*value)
        copy.update(zip(keys, children, strict=True))
        return copy
    if _is_struct_sequence(value):
        return type(value)(children)
    built_in = _built_in(value)
    if built_in is tuple:
        return tuple.__new__(type(value), children)
    made = built_in.__new__(type(value))
    if built_in is list:
        list.extend(made, children)
    elif isinstance(value, dict):
        _fill_dict(made, value, children)
    else:
        for name, child in zip(_attributes(value) or (), children, strict=True):
            object.__setattr__(made, name, child)  # also if it is frozen
    return made


def leaves_of(value: Any, is_leaf: Callable[[Any], bool], path: str) -> Iterator[tuple[str, Any]]:
    """Yield what is in the containers of `value`, with its path; a `Leaf` for one that cannot be put together again."""
    parts = None
    if not is_leaf(value):
        parts = take_apart(value)
    if parts is None:
        yield path, value
        return
    if parts.problem:
        yield path, Leaf(parts.problem)
        return
    for name, child in zip(parts.names, parts.children, strict=True):
        yield from leaves_of(child, is_leaf, _child_path(path, parts.kind, name))


def replace_leaves(value: Any, is_leaf: Callable[[Any], bool], leaves: Iterator[Any]) -> Any:
    """Copy `value` with these leaves in place of those that `leaves_of` yields."""
    parts = None
    if not is_leaf(value):
        parts = take_apart(value)
    if parts is None:
        return next(leaves)
    children = [replace_leaves(child, is_leaf, leaves) for child in parts.children]
    return put_together(value, children)


def _flatten_all(values: Sequence[Any], leaves: list[Any]) -> tuple[Spec, ...]:
    kinds = set(map(type, values))
    if kinds == {float}:  # metrics: the same, ten times as fast
        leaves.extend(values)
        return (NUMBER,) * len(values)
    if kinds <= _TENSORS:
        return tuple([_flatten_tensor(value, leaves) for value in values])
    return tuple([flatten(value, leaves) for value in values])


def _unflatten_all(values: Sequence[Any], leaves: Iterator[Any]) -> list[Any]:
    kinds = set(map(type, values))
    if kinds == {float} or kinds <= _TENSORS:
        return list(islice(leaves, len(values)))
    return [unflatten(value, leaves) for value in values]


def _flatten_tensor(value: Tensor, leaves: list[Any]) -> Leaf:
    value = whole(value)
    problem = explain_not_dense(value)
    if problem:
        return Leaf(problem)
    if loses_gradient(value):
        return Leaf("a tensor whose gradient would be lost (pass it.detach(), or join rows by gather_batch())")
    tensor = value.detach() if value.requires_grad else value
    if tensor.dtype not in _REAL:
        hint = " (pass torch.view_as_real(it))" if tensor.is_complex() else ""
        return Leaf(f"a {name_dtype(tensor.dtype)} tensor{hint}")
    if type(tensor) is not Tensor:
        tensor = tensor.as_subclass(Tensor)
    leaves.append(tensor)
    return Leaf("tensor", tensor.dtype, tensor.shape, tensor.device.type)


def _flatten_array(value: Any, leaves: list[Any]) -> Leaf:
    """Flatten NumPy's arrays and scalars. Leaves are copies: torch refuses arrays that are reversed or read-only."""
    kind = type(value).__name__
    is_scalar = isinstance(value, np.generic)
    if not is_scalar and type(value) not in (np.ndarray, np.memmap):
        return Leaf(f"{kind} of {value.dtype} (pass a plain array)")
    dtype = value.dtype.newbyteorder("=")
    if dtype not in _NATIVE:
        return Leaf(f"{kind} of {dtype}")
    tensor = torch.from_numpy(np.array(value, dtype=dtype))
    leaves.append(tensor)
    return Leaf("scalar" if is_scalar else "array", tensor.dtype, tensor.shape)


def _flatten_other(value: Any, leaves: list[Any]) -> Leaf:
    name = type(value).__name__
    if isinstance(value, Enum):
        return Leaf(f"member of {name} (pass its value)")
    if isinstance(value, int):  # somebody's own kind of number
        leaves.append(int(value))
        return NUMBER
    if isinstance(value, float):
        leaves.append(float(value))
        return NUMBER
    if isinstance(value, Mapping):
        return Leaf(f"{name} (pass dict(it))")
    if isinstance(value, Set):
        return Leaf(f"{name} (it has no order: pass a sorted list)")
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return Leaf(f"{name} (pass list(it))")
    return Leaf(f"object of type {name}")


def _take_dict_apart(value: dict[Any, Any]) -> Parts:
    if type(value) not in _DICTS:
        problem = _explain_uncopyable_dict(value)
        if problem:
            return Parts("dict", (), [], problem)
    keys, names = _sort_keys(*value)
    return Parts("dict", names, [value[key] for key in keys])


def _take_sequence_apart(value: list[Any] | tuple[Any, ...]) -> Parts:
    kind = _kind_of_sequence(value)
    if type(value) not in (list, tuple):
        problem = _explain_uncopyable_sequence(value)
        if problem:
            return Parts(kind, (), [], problem)
    names = getattr(type(value), "_fields", None)
    if not names:
        names = map(str, range(len(value)))
    return Parts(kind, tuple(names), list(value))


def _take_object_apart(value: Any, attributes: tuple[str, ...]) -> Parts:
    kind = type(value).__name__
    if is_dataclass(value):
        kind = f"dataclass {kind}"
    children = [getattr(value, name, None) for name in attributes]
    return Parts(kind, attributes, children, _explain_uncopyable_object(value, attributes))


@lru_cache(maxsize=256, typed=True)
def _sort_keys(*keys: Any) -> tuple[list[Any], tuple[str, ...]]:
    """Sort the keys of a dict by how they print, the same on every rank; return them and their texts."""
    in_order = sorted(keys, key=repr)
    names = tuple(map(repr, in_order))
    for name, following in pairwise(names):
        if name == following:
            raise TypeError(f"A dict has two keys that print as {name}, so ranks could pair them differently.")
    return in_order, names


def _attributes(value: Any) -> tuple[str, ...] | None:
    """List the attributes that make up an object; return None if that is not known of its type."""
    if is_dataclass(value) and not isinstance(value, type):
        return tuple(field.name for field in fields(value))
    if isinstance(value, SimpleNamespace):
        return tuple(sorted(vars(value)))
    if isinstance(value, (UserDict, UserList)):
        return ("data",)
    return None


def _kind_of_sequence(value: list[Any] | tuple[Any, ...]) -> str:
    if isinstance(value, list):
        return "list"
    if hasattr(type(value), "_fields"):
        return f"namedtuple {type(value).__name__}"
    return "tuple"


def _is_struct_sequence(value: Any) -> bool:
    """Return whether a value is of the kind of tuple that torch.max and its kin return."""
    return hasattr(type(value), "n_sequence_fields")


def _explain_uncopyable_dict(value: dict[Any, Any]) -> str:
    """Say why a copy of a dict's subclass might not be right; "" if it is."""
    items = dict(_built_in(value).items(value))
    if not _iterates_over(value, items) or any(value[key] is not child for key, child in items.items()):
        return f"{type(value).__name__}, which shows other values than it holds (pass dict(it))"
    known = set()
    for name, attribute in _state(value).items():
        if attribute is None or items.get(name) is attribute:  # the class keeps keys as attributes, too
            known.add(name)
    return _explain_attributes(value, known, "keys")


def _explain_uncopyable_sequence(value: Sequence[Any]) -> str:
    """Say why a copy of a list's or tuple's subclass might not be right; "" if it is."""
    name = type(value).__name__
    if isinstance(value, tuple) and not _is_struct_sequence(value):
        try:
            tuple.__new__(type(value))
        except TypeError:  # torch.Size
            return f"{name} (pass list(it))"
    elements = list(_built_in(value).__iter__(value))
    if not _iterates_over(value, elements):
        return f"{name}, which shows other values than it holds (pass list(it))"
    return _explain_attributes(value, set(), "elements")


def _explain_uncopyable_object(value: Any, attributes: tuple[str, ...]) -> str:
    """Say why a copy of an object with other attributes might not be right; "" if it is."""
    kind = type(value).__name__
    for name in attributes:
        if not hasattr(value, name):
            return f"{kind}, whose {name} is not set"
    problem = _explain_attributes(value, set(attributes), "fields")
    if problem:
        return problem
    try:
        _built_in(value).__new__(type(value))
    except TypeError:
        return f"{kind}, which cannot be copied (pass its values alone, as a dict)"
    return ""


def _explain_attributes(value: Any, known: set[str], parts: str) -> str:
    """Say which attributes would be lost or wrong in a copy with other children; "" if none."""
    hidden = sorted(_state(value).keys() - known)
    if not hidden:
        return ""
    kind = type(value).__name__
    return f"{kind}, whose attributes {', '.join(hidden)} are not its {parts} (pass its values alone, as a dict)"


def _iterates_over(value: Any, items: Collection[Any]) -> bool:
    """Return whether a loop over a container gives just these items: that of a subclass may be another, without end."""
    found = list(islice(value, len(items) + 1))
    if len(value) != len(items) or len(found) != len(items):
        return False
    return all(map(operator.is_, found, items))


def _state(value: Any) -> dict[str, Any]:
    """Collect an object's attributes, less those that its class computes anew."""
    state = dict(getattr(value, "__dict__", {}))
    for base in type(value).__mro__:
        for slot in _slots(base):
            if hasattr(value, slot):
                state[slot] = getattr(value, slot)
    for name in list(state):
        if isinstance(getattr(type(value), name, None), cached_property):
            del state[name]
    return state


def _slots(kind: type) -> set[str]:
    """List the attributes that a class keeps in slots of its own."""
    slots = kind.__dict__.get("__slots__", ())
    if isinstance(slots, str):
        slots = [slots]
    return set(slots) - {"__dict__", "__weakref__"}


def _built_in(value: Any) -> Any:
    """Return the type of Python's own that holds the children, whatever a subclass has made of its methods."""
    return next(kind for kind in _BUILT_IN if isinstance(value, kind))


def _fill_dict(made: Any, value: dict[Any, Any], children: list[Any]) -> None:
    """Put children into an empty dict of the class of `value`, in its order, with its attributes."""
    keys, _ = _sort_keys(*value)
    new = dict(zip(keys, children, strict=True))
    built_in = _built_in(value)
    for key in value:
        built_in.__setitem__(made, key, new[key])
    if isinstance(value, defaultdict):
        made.default_factory = value.default_factory
    if getattr(value, "__dict__", None) is value:
        made.__dict__ = made
        return
    for name in _state(value):
        object.__setattr__(made, name, new.get(name))
