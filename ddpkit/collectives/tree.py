"""Take nested values apart into a flat list of leaves, and put them together again, on this rank alone."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
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
    if isinstance(value, dict):
        return _take_dict_apart(value)
    if isinstance(value, (list, tuple)):
        return _take_sequence_apart(value)
    if is_dataclass(value) and not isinstance(value, type):
        return _take_dataclass_apart(value)
    return None


def put_together(value: Any, children: list[Any]) -> Any:
    """Copy a container that was taken apart, with these children. Code of its class, which may refuse, is not run."""
    kind = type(value)
    if kind is list:
        return children
    if isinstance(value, dict):
        return _copy_dict(value, children)
    if isinstance(value, list):
        made = list.__new__(kind)
        list.extend(made, children)
        return made
    if hasattr(kind, "n_sequence_fields"):  # what torch.max and its kin return
        return kind(children)
    if isinstance(value, tuple):
        return tuple.__new__(kind, children)
    made = object.__new__(kind)
    for field, child in zip(fields(value), children, strict=True):
        object.__setattr__(made, field.name, child)  # also if it is frozen
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
    if isinstance(value, SimpleNamespace):
        return Leaf(f"{name} (pass vars(it))")
    if isinstance(value, Set):
        return Leaf(f"{name} (it has no order: pass a sorted list)")
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return Leaf(f"{name} (pass list(it))")
    return Leaf(f"object of type {name}")


def _take_dict_apart(value: dict[Any, Any]) -> Parts:
    items, problem = value, ""
    if type(value) not in _DICTS:
        items = dict(_built_in(value).items(value))
        problem = _explain_hidden(value, items, "keys (pass dict(it))")
    keys, names = _sort_keys(*items)
    return Parts("dict", names, [items[key] for key in keys], problem)


def _take_sequence_apart(value: list[Any] | tuple[Any, ...]) -> Parts:
    kind = "list" if isinstance(value, list) else "tuple"
    children = list(list.__iter__(value) if isinstance(value, list) else tuple.__iter__(value))
    names = getattr(type(value), "_fields", None)
    if names is not None:
        kind = f"namedtuple {type(value).__name__}"
    problem = ""
    if isinstance(value, torch.Size):  # whose constructor takes nothing but ints
        problem = "Size (pass list(it))"
    elif type(value) not in (list, tuple):
        problem = _explain_hidden(value, {}, "elements (pass list(it))")
    return Parts(kind, tuple(names or map(str, range(len(children)))), children, problem)


def _take_dataclass_apart(value: Any) -> Parts:
    names = tuple(field.name for field in fields(value))
    children = {name: getattr(value, name, None) for name in names}
    problem = _explain_hidden(value, children, "fields (pass its values alone, as a dict)")
    return Parts(f"dataclass {type(value).__name__}", names, list(children.values()), problem)


def _explain_hidden(value: Any, children: dict[Any, Any], where: str) -> str:
    """Say which attributes a copy with other children would lack, or have wrong; "" if none."""
    hidden = []
    for name, attribute in getattr(value, "__dict__", {}).items():
        is_child = attribute is None or children.get(name) is attribute  # some dicts keep keys as attributes, too
        if not is_child and not isinstance(getattr(type(value), name, None), cached_property):
            hidden.append(name)
    if not hidden:
        return ""
    return f"{type(value).__name__}, with attributes {', '.join(hidden)} beside its {where}"


def _built_in(value: dict[Any, Any]) -> Any:
    """Return the class of Python's own that a dict is of."""
    return next(kind for kind in (defaultdict, OrderedDict, dict) if isinstance(value, kind))


def _copy_dict(value: dict[Any, Any], children: list[Any]) -> Any:
    """Copy a dict with its class and order, and attributes that are its keys, too."""
    built_in = _built_in(value)
    made: Any = built_in.__new__(type(value))
    order = list(built_in.keys(value))
    keys, _ = _sort_keys(*order)
    new = dict(zip(keys, children, strict=True))
    for key in order:
        built_in.__setitem__(made, key, new[key])
    if isinstance(value, defaultdict):
        made.default_factory = value.default_factory
    attributes = getattr(value, "__dict__", {})
    if attributes is value:
        made.__dict__ = made
        return made
    for name, attribute in attributes.items():
        if attribute is None or name in new:
            object.__setattr__(made, name, new.get(name))
    return made


@lru_cache(maxsize=256, typed=True)
def _sort_keys(*keys: Any) -> tuple[list[Any], tuple[str, ...]]:
    """Sort the keys of a dict by how they print, the same on every rank; return them and their texts."""
    in_order = sorted(keys, key=repr)
    names = tuple(map(repr, in_order))
    for name, following in pairwise(names):
        if name == following:
            raise TypeError(f"A dict has two keys that print as {name}, so ranks could pair them differently.")
    return in_order, names
