"""Nested values, taken apart into a flat list of leaves and put together again. Nothing here talks to other ranks."""

from __future__ import annotations

import operator
from collections import Counter, OrderedDict, UserDict, UserList, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cached_property, lru_cache
from itertools import islice
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ..torch_internals import is_sharded

_NATIVE_NAMES = ["bool", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8"]
NATIVE = {np.dtype(name) for name in _NATIVE_NAMES}
REAL = {torch.from_numpy(np.zeros(0, dtype)).dtype for dtype in NATIVE} | {torch.bfloat16}
_NUMBERS = {float, int, bool, np.float64}
_DICTS = {dict, OrderedDict, defaultdict, Counter}  # their values are all there is to them
_BUILT_IN = (defaultdict, OrderedDict, dict, list, tuple, SimpleNamespace, object)


class Leaf(NamedTuple):
    """What must be equal on all ranks for a leaf to be combined. Python's int, float and bool are one kind: number."""

    kind: str
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = ()
    device: str = "cpu"

    @property
    def known(self) -> bool:
        """Whether it can be combined at all; a str, for example, cannot."""
        return self.dtype is not None or self == NUMBER

    def __str__(self) -> str:
        if self.dtype is None:
            return self.kind
        place = "" if self.device == "cpu" else f" on {self.device}"
        return f"{str(self.dtype).removeprefix('torch.')} {self.kind} of shape {tuple(self.shape)}{place}"


class Node(NamedTuple):
    """A container: its kind, where its children are (as `['loss']`, `[0]`, `.x`), and what they are."""

    kind: str
    names: tuple[str, ...]
    children: tuple[Any, ...]

    def __str__(self) -> str:
        return f"{self.kind} of {len(self.children)}"


class Parts(NamedTuple):
    """A container taken apart. `problem` says why it cannot be put together again; "" if it can."""

    kind: str
    names: tuple[str, ...]
    children: list[Any]
    problem: str = ""


Spec = Leaf | Node
NUMBER = Leaf("number")


def flatten(value: Any, leaves: list[Any]) -> Spec:
    """Append the leaves of `value` to `leaves` and return what the value is like without them.

    Leaves are Python numbers, and tensors for all that has a dtype. The keys of a dict are visited in sorted order, so
    that two dicts filled in different order have the same spec. What is neither is not appended, and not `known`.
    """
    if type(value) in _NUMBERS:
        leaves.append(value)
        return NUMBER
    if isinstance(value, (Tensor, np.ndarray, np.generic)):
        return _flatten_array(value, leaves)
    parts = take_apart(value)
    if parts is None:
        return _flatten_other(value, leaves)
    if parts.problem:
        return Leaf(parts.problem)
    return Node(parts.kind, parts.names, _flatten_all(parts.children, leaves))


def rebuild(value: Any, leaves: Iterator[Any]) -> Any:
    """Copy `value` with these leaves, in the order that `flatten` gave; containers keep type and order."""
    if isinstance(value, np.float64):
        return np.float64(next(leaves))
    if isinstance(value, np.ndarray):
        return next(leaves).numpy()
    if isinstance(value, np.generic):
        return next(leaves).numpy()[()]
    parts = None if type(value) in _NUMBERS or isinstance(value, Tensor) else take_apart(value)
    if parts is None:
        return next(leaves)
    return put_together(value, _rebuild_all(parts.children, leaves))


def walk(spec: Spec, path: str = "value") -> Iterator[tuple[str, Spec]]:
    """Yield every container and leaf with its path, as in `("value['loss']", Leaf(...))`, in the order of `flatten`."""
    yield path, spec
    if isinstance(spec, Node):
        for name, child in zip(spec.names, spec.children, strict=True):
            yield from walk(child, child_path(path, spec.kind, name))


def child_path(path: str, kind: str, name: str) -> str:
    """Write the path of a container's child as Python does."""
    return f"{path}[{name}]" if kind in ("dict", "list", "tuple") else f"{path}.{name}"


def take_apart(value: Any) -> Parts | None:
    """Take a container apart; None for a value that is none."""
    if isinstance(value, Enum):
        return None
    if isinstance(value, dict):
        if type(value) not in _DICTS and (problem := _problem_of_dict(value)):
            return Parts("dict", (), [], problem)
        keys, names = _in_order(*value)
        return Parts("dict", names, [value[key] for key in keys])
    if isinstance(value, (list, tuple)):
        if type(value) not in (list, tuple) and (problem := _problem_of_sequence(value)):
            return Parts(_kind_of_sequence(value), (), [], problem)
        places = tuple(getattr(type(value), "_fields", None) or map(str, range(len(value))))
        return Parts(_kind_of_sequence(value), places, list(value))
    attributes = _attributes(value)
    if attributes is None:
        return None
    kind = type(value).__name__
    unset = [name for name in attributes if not hasattr(value, name)]
    problem = f"{kind}, whose {unset[0]} is not set" if unset else _hidden(value, set(attributes), "fields")
    children = [getattr(value, name, None) for name in attributes]
    return Parts(f"dataclass {kind}" if is_dataclass(value) else kind, attributes, children, problem)


def put_together(value: Any, children: list[Any]) -> Any:
    """Copy a container that was taken apart, with these children. Code of its class, which may refuse, is not run."""
    if type(value) is list:
        return children
    if type(value) is dict:
        copy = value.copy()
        copy.update(zip(_in_order(*value)[0], children, strict=True))
        return copy
    if hasattr(type(value), "n_sequence_fields"):  # what torch.max and its kin return
        return type(value)(children)
    built_in = _built_in(value)
    if built_in is tuple:
        return tuple.__new__(type(value), children)
    made = built_in.__new__(type(value))
    if built_in is list:
        list.extend(made, children)
    elif isinstance(value, dict):
        _fill_dict(made, value, built_in, children)
    else:
        for name, child in zip(_attributes(value) or (), children, strict=True):
            object.__setattr__(made, name, child)  # also if it is frozen
    return made


def leaves_of(value: Any, is_leaf: Callable[[Any], bool], path: str) -> Iterator[tuple[str, Any]]:
    """Yield what is in the containers of `value`, with its path; a `Leaf` for one that cannot be put together again."""
    parts = None if is_leaf(value) else take_apart(value)
    if parts is None:
        yield path, value
        return
    if parts.problem:
        yield path, Leaf(parts.problem)
        return
    for name, child in zip(parts.names, parts.children, strict=True):
        yield from leaves_of(child, is_leaf, child_path(path, parts.kind, name))


def with_leaves(value: Any, is_leaf: Callable[[Any], bool], leaves: Iterator[Any]) -> Any:
    """Copy `value` with these leaves in place of those that `leaves_of` yields."""
    parts = None if is_leaf(value) else take_apart(value)
    if parts is None:
        return next(leaves)
    return put_together(value, [with_leaves(child, is_leaf, leaves) for child in parts.children])


def plain_index(value: Any) -> Any:
    """Turn any kind of integer but a bool into Python's; leave anything else as it is."""
    if isinstance(value, (bool, np.bool_)) or (isinstance(value, Tensor) and value.dtype == torch.bool):
        return value
    try:
        return operator.index(value)
    except Exception:  # whatever a class of somebody's own raises; tensors raise other errors by their size and dtype
        return value


def tensor_problem(tensor: Tensor) -> str:
    """Say why a tensor's elements are not simply those in its memory; "" if they are."""
    kind = type(tensor)
    if kind not in (Tensor, nn.Parameter):
        if is_sharded(tensor):
            return "a sharded tensor (fully_shard, FSDP, tensor parallelism; pass tensor.full_tensor())"
        if kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ or nn.parameter.is_lazy(tensor):
            return f"{kind.__name__}, a kind of tensor whose memory does not show its values"
    if tensor.is_meta:
        return "a meta tensor, which has no values"
    if tensor.is_nested or tensor.layout != torch.strided:
        layout = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        return f"a {layout} tensor (pass a dense one)"
    return f"a {_name(tensor.dtype)} tensor (pass tensor.dequantize())" if tensor.is_quantized else ""


@lru_cache(maxsize=256, typed=True)
def _in_order(*keys: Any) -> tuple[list[Any], tuple[str, ...]]:
    in_order = sorted(keys, key=repr)
    names = tuple(map(repr, in_order))
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise TypeError(f"A dict has two keys that print as {twice}, so that ranks may not mean the same by them.")
    return in_order, names


def _attributes(value: Any) -> tuple[str, ...] | None:
    """List the attributes that make up an object, if that is known of its type."""
    if is_dataclass(value) and not isinstance(value, type):
        return tuple(field.name for field in fields(value))
    if isinstance(value, SimpleNamespace):
        return tuple(sorted(vars(value)))
    return ("data",) if isinstance(value, (UserDict, UserList)) else None


def _kind_of_sequence(value: list[Any] | tuple[Any, ...]) -> str:
    if isinstance(value, list):
        return "list"
    return f"namedtuple {type(value).__name__}" if hasattr(type(value), "_fields") else "tuple"


def _problem_of_dict(value: dict[Any, Any]) -> str:
    held = dict(_built_in(value).items(value))
    if not _shows(value, held) or any(value[key] is not child for key, child in held.items()):
        return f"{type(value).__name__}, which shows other values than it holds (pass dict(it))"
    mirrored = {name for name, child in _state(value).items() if child is None or held.get(name) is child}
    return _hidden(value, mirrored, "keys")


def _problem_of_sequence(value: Sequence[Any]) -> str:
    if isinstance(value, tuple) and not hasattr(type(value), "n_sequence_fields"):
        try:
            tuple.__new__(type(value))
        except TypeError:  # torch.Size
            return f"{type(value).__name__} (pass list(it))"
    if not _shows(value, list(_built_in(value).__iter__(value))):
        return f"{type(value).__name__}, which shows other values than it holds (pass list(it))"
    return _hidden(value, set(), "elements")


def _shows(value: Any, held: Collection[Any]) -> bool:
    """Return whether a loop over a container sees just what it holds: a subclass may do it otherwise, without end."""
    shown = list(islice(value, len(held) + 1))
    return len(value) == len(held) == len(shown) and all(map(operator.is_, shown, held))


def _hidden(value: Any, known: set[str], parts: str) -> str:
    """Say which attributes would be lost or wrong in a copy with other children; "" if none."""
    hidden = sorted(_state(value).keys() - known)
    kind = type(value).__name__
    if hidden:
        return f"{kind}, whose attributes {', '.join(hidden)} are not its {parts} (pass its values alone, as a dict)"
    try:
        _built_in(value).__new__(type(value)) if parts == "fields" else None
    except TypeError:
        return f"{kind}, which cannot be copied (pass its values alone, as a dict)"
    return ""


def _state(value: Any) -> dict[str, Any]:
    """Collect an object's attributes, less those that its class computes anew."""
    state = dict(getattr(value, "__dict__", {}))
    for base in type(value).__mro__:
        slots = base.__dict__.get("__slots__", ())
        slots = {slots} if isinstance(slots, str) else set(slots) - {"__dict__", "__weakref__"}
        state.update({slot: getattr(value, slot) for slot in slots if hasattr(value, slot)})
    return {name: x for name, x in state.items() if not isinstance(getattr(type(value), name, 0), cached_property)}


def _built_in(value: Any) -> Any:
    """Return the type of Python's own that holds the children, whatever a subclass has made of its methods."""
    return next(kind for kind in _BUILT_IN if isinstance(value, kind))


def _fill_dict(made: Any, value: dict[Any, Any], built_in: Any, children: list[Any]) -> None:
    keys, _ = _in_order(*value)
    new = dict(zip(keys, children, strict=True))
    for key in value:
        built_in.__setitem__(made, key, new[key])
    if isinstance(value, defaultdict):
        made.default_factory = value.default_factory
    if getattr(value, "__dict__", None) is value:
        made.__dict__ = made
        return
    for name in _state(value):
        object.__setattr__(made, name, new.get(name))


def _flatten_all(values: Sequence[Any], leaves: list[Any]) -> tuple[Spec, ...]:
    if set(map(type, values)) == {float}:  # metrics: the same, ten times as fast
        leaves.extend(values)
        return (NUMBER,) * len(values)
    return tuple([flatten(value, leaves) for value in values])


def _rebuild_all(values: Sequence[Any], leaves: Iterator[Any]) -> list[Any]:
    if set(map(type, values)) == {float}:
        return list(islice(leaves, len(values)))
    return [rebuild(value, leaves) for value in values]


def _flatten_array(value: Any, leaves: list[Any]) -> Leaf:
    if isinstance(value, Tensor):
        if problem := tensor_problem(value):
            return Leaf(problem)
        kind, tensor = "tensor", value.detach()
        if tensor.dtype not in REAL:
            hint = " (pass torch.view_as_real(it))" if tensor.is_complex() else ""
            return Leaf(f"a {_name(tensor.dtype)} tensor{hint}")
        if type(tensor) is not Tensor:
            tensor = tensor.as_subclass(Tensor)
    else:
        if type(value) not in (np.ndarray, np.memmap) and not isinstance(value, np.generic):
            return Leaf(f"{type(value).__name__} of {value.dtype} (pass a plain array)")
        kind, dtype = "array" if isinstance(value, np.ndarray) else "scalar", value.dtype.newbyteorder("=")
        if dtype not in NATIVE:
            return Leaf(f"{type(value).__name__} of {dtype}")
        tensor = torch.from_numpy(np.array(value, dtype=dtype))  # a copy: torch refuses reversed and read-only arrays
    leaves.append(tensor)
    return Leaf(kind, tensor.dtype, tensor.shape, tensor.device.type)


def _flatten_other(value: Any, leaves: list[Any]) -> Leaf:
    if isinstance(value, Enum):
        return Leaf(f"member of {type(value).__name__} (pass its value)")
    if isinstance(value, (int, float)):  # somebody's own kind of number
        leaves.append(int(value) if isinstance(value, int) else float(value))
        return NUMBER
    name = type(value).__name__
    if isinstance(value, Mapping):
        return Leaf(f"{name} (pass dict(it))")
    if isinstance(value, Set):
        return Leaf(f"{name} (it has no order: pass a sorted list)")
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return Leaf(f"{name} (pass list(it))")
    return Leaf(f"object of type {name}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
