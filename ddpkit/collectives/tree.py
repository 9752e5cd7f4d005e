"""Take nested values apart into leaves, describe these, and put them together again, on this rank alone."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cached_property, lru_cache
from itertools import islice, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ..torch_internals import has_no_memory, is_dtensor, is_sharded

# Dense tensors: which are, their bytes, and how they are joined.


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


# Nested values and what they are made of.

_NATIVE_NAMES = ["bool", "u1", "u2", "u4", "i1", "i2", "i4", "i8", "f2", "f4", "f8"]
_NATIVE = {np.dtype(name) for name in _NATIVE_NAMES}
_REAL = {torch.from_numpy(np.zeros(0, dtype)).dtype for dtype in _NATIVE} | {torch.bfloat16}
_NO_CONTAINERS = {float, Tensor, nn.Parameter}
_DICTS = {dict, OrderedDict, defaultdict, Counter}
_PLAIN = {*_DICTS, list, tuple}  # their children are all there is to them


class Container(str):
    """Name a container that was taken apart, with the number of its children: `dict of 2`."""

    __slots__ = ()


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


NUMBER = Leaf("number")
_leaf_of = lru_cache(maxsize=1024)(Leaf)  # the same one for each of many tensors, so that they are compared quickly
IsLeaf = Callable[[Any], bool]


def is_tensor(value: Any) -> bool:
    """Return whether a value is a tensor: where a tree of tensors ends."""
    return isinstance(value, Tensor)


def is_value(value: Any) -> bool:
    """Return whether a value is a number, an array or a tensor: where a tree that can be reduced ends."""
    return isinstance(value, (float, int, Tensor, np.ndarray, np.generic))


def flatten(value: Any, is_leaf: IsLeaf, path: str = "value") -> tuple[list[str], list[Any]]:
    """List what a nested value is made of; the keys of a dict in sorted order, the same on every rank.

    Returns:
        Paths, as Python writes them, as `value['loss'][0]`; and what is there: a `Container` before all that is in it,
        leaves as they are, and in the place of a container that cannot be put together again a `Leaf` that says why.
    """
    paths: list[str] = []
    parts: list[Any] = []
    _flatten_into(paths, parts, value, is_leaf, path)
    return paths, parts


def leaves_of(value: Any, is_leaf: IsLeaf = is_tensor, path: str = "value") -> dict[str, Any]:
    """Find the leaves of a nested value, by path."""
    paths, parts = flatten(value, is_leaf, path)
    return {path: part for path, part in zip(paths, parts, strict=True) if type(part) is not Container}


def replace_leaves(value: Any, leaves: Iterator[Any], is_leaf: IsLeaf = is_tensor) -> Any:
    """Copy a nested value with other leaves, in the order of `flatten`; containers keep their class and order."""
    parts = None if is_leaf(value) else _take_apart(value)
    if parts is None:
        return next(leaves)
    if _has_no_containers(parts.children):
        children = list(islice(leaves, len(parts.children)))
    else:
        children = [replace_leaves(child, leaves, is_leaf) for child in parts.children]
    return _put_together(value, children)


class Described(NamedTuple):
    """Describe a value that may be reduced.

    Attributes:
        paths: Where its containers and leaves are.
        parts: What they are, a `Container` or a `Leaf` for each path.
        leaves: The number or plain tensor that is taken for each leaf.
        arrays: Leaves that are NumPy's, by their index.
    """

    paths: tuple[str, ...]
    parts: tuple[Any, ...]
    leaves: list[Any]
    arrays: dict[int, Any]


def describe(value: Any) -> Described:
    """Describe all that a value is made of: equal on all ranks if they can be combined."""
    paths, parts = flatten(value, is_value)
    leaves: list[Any] = []
    arrays: dict[int, Any] = {}
    for i, part in enumerate(parts):
        if type(part) is float:
            parts[i] = NUMBER
            leaves.append(part)
        elif type(part) is not Container:
            if isinstance(part, (np.ndarray, np.generic)):
                arrays[len(leaves)] = part
            parts[i], leaf = _describe_leaf(part)
            leaves.append(leaf)
    return Described(tuple(paths), tuple(parts), leaves, arrays)


def rebuild(value: Any, described: Described, results: list[Any]) -> Any:
    """Copy a value with these leaves, arrays and scalars of NumPy as such again."""
    for i, given in described.arrays.items():
        if isinstance(given, np.float64):
            results[i] = np.float64(results[i])
        elif isinstance(given, np.ndarray):
            results[i] = results[i].numpy()
        else:
            results[i] = results[i].numpy()[()]
    return replace_leaves(value, iter(results), is_value)


def _describe_leaf(value: Any) -> tuple[Leaf, Any]:
    """Describe a value that may be reduced; return also a number or plain tensor to take for it."""
    if isinstance(value, Tensor):
        return _describe_tensor(value)
    if isinstance(value, (np.ndarray, np.generic)) and type(value) is not np.float64:
        return _describe_array(value)
    name = type(value).__name__
    if isinstance(value, Enum):
        return Leaf(f"member of {name} (pass its value)"), None
    if isinstance(value, bool):
        return NUMBER, value
    if isinstance(value, int):  # also somebody's own kind of number
        return NUMBER, int(value)
    if isinstance(value, float):
        return NUMBER, float(value)
    if isinstance(value, Leaf):
        return value, None
    return Leaf(f"object of type {name}"), None


def _describe_tensor(value: Tensor) -> tuple[Leaf, Any]:
    value = whole(value)
    problem = explain_not_dense(value)
    if not problem and loses_gradient(value):
        problem = "a tensor whose gradient would be lost (pass it.detach(), or join rows by gather_batch())"
    if not problem and value.dtype not in _REAL:
        hint = " (pass torch.view_as_real(it))" if value.is_complex() else ""
        problem = f"a {name_dtype(value.dtype)} tensor{hint}"
    if problem:
        return Leaf(problem), None
    tensor = value.detach() if value.requires_grad else value
    if type(tensor) is not Tensor:
        tensor = tensor.as_subclass(Tensor)
    return _leaf_of("tensor", tensor.dtype, tensor.shape, tensor.device.type), tensor


def _describe_array(value: Any) -> tuple[Leaf, Any]:
    """Describe NumPy's arrays and scalars. The tensors are copies: torch refuses what is reversed or read-only."""
    kind = type(value).__name__
    is_scalar = isinstance(value, np.generic)
    if not is_scalar and type(value) not in (np.ndarray, np.memmap):
        return Leaf(f"{kind} of {value.dtype} (pass a plain array)"), None
    dtype = value.dtype.newbyteorder("=")
    if dtype not in _NATIVE:
        return Leaf(f"{kind} of {dtype}"), None
    tensor = torch.from_numpy(np.array(value, dtype=dtype))
    return Leaf("scalar" if is_scalar else "array", tensor.dtype, tensor.shape), tensor


# Containers: how they are taken apart and put together.


class _Parts(NamedTuple):
    """Hold a container taken apart. `problem` says why it cannot be put together again; "" if it can."""

    kind: str
    suffixes: tuple[str, ...]  # of the children's paths: "['loss']", "[0]", ".x"
    children: list[Any]
    problem: str = ""


def _flatten_into(paths: list[str], parts: list[Any], value: Any, is_leaf: IsLeaf, path: str) -> None:
    taken = None if is_leaf(value) else _take_apart(value)
    paths.append(path)
    if taken is None:
        parts.append(value)
    elif taken.problem:
        parts.append(Leaf(taken.problem))
    else:
        parts.append(Container(f"{taken.kind} of {len(taken.children)}"))
        child_paths = _child_paths(path, taken.suffixes)
        if _has_no_containers(taken.children):
            paths += child_paths
            parts += taken.children
            return
        for child_path, child in zip(child_paths, taken.children, strict=True):
            _flatten_into(paths, parts, child, is_leaf, child_path)


@lru_cache(maxsize=256)
def _child_paths(path: str, suffixes: tuple[str, ...]) -> list[str]:
    return [path + suffix for suffix in suffixes]


def _has_no_containers(values: list[Any]) -> bool:
    """Return whether these are all of the usual kinds of leaf: then they need not be looked at one by one."""
    return set(map(type, values)) <= _NO_CONTAINERS


def _take_apart(value: Any) -> _Parts | None:
    """Take a container apart; return None for a value that is none."""
    if isinstance(value, dict):
        items = value
        if type(value) not in _DICTS:
            items = dict(_built_in(value).items(value))
        keys, suffixes = _sort_keys(*items)
        return _Parts("dict", suffixes, [items[key] for key in keys], _explain_hidden(value, items))
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):  # which takes nothing but ints
        return _take_sequence_apart(value)
    if is_dataclass(value) and not isinstance(value, type):
        children = {field.name: getattr(value, field.name, None) for field in fields(value)}
        suffixes = tuple(f".{name}" for name in children)
        problem = _explain_hidden(value, children)
        return _Parts(f"dataclass {type(value).__name__}", suffixes, list(children.values()), problem)
    return None


@lru_cache(maxsize=256, typed=True)
def _sort_keys(*keys: Any) -> tuple[list[Any], tuple[str, ...]]:
    """Sort the keys of a dict by how they print, the same on every rank; return them and their texts in a path."""
    in_order = sorted(keys, key=repr)
    names = list(map(repr, in_order))
    for name, following in pairwise(names):
        if name == following:
            raise TypeError(f"A dict has two keys that print as {name}, so ranks could pair them differently.")
    return in_order, tuple(f"[{name}]" for name in names)


def _take_sequence_apart(value: list[Any] | tuple[Any, ...]) -> _Parts:
    kind, built_in = ("list", list) if isinstance(value, list) else ("tuple", tuple)
    children: list[Any] = list(built_in.__iter__(value))  # type: ignore[arg-type]
    names = getattr(type(value), "_fields", None)
    if names is None:
        suffixes = [f"[{i}]" for i in range(len(children))]
    else:
        kind = f"namedtuple {type(value).__name__}"
        suffixes = [f".{name}" for name in names]
    return _Parts(kind, tuple(suffixes), children, _explain_hidden(value, {}))


def _explain_hidden(value: Any, children: dict[Any, Any]) -> str:
    """Say which attributes a copy with other children would lack, or have wrong; "" if none."""
    if type(value) in _PLAIN:
        return ""
    hidden = []
    for name, attribute in getattr(value, "__dict__", {}).items():
        is_child = attribute is None or children.get(name) is attribute  # some dicts keep keys as attributes, too
        if not is_child and not isinstance(getattr(type(value), name, None), cached_property):
            hidden.append(name)
    if not hidden:
        return ""
    names = ", ".join(hidden)
    return f"{type(value).__name__}, with attributes {names} beside what it contains (pass a plain dict or list)"


def _put_together(value: Any, children: list[Any]) -> Any:
    """Copy a container that was taken apart, with these children. Code of its class, which may refuse, is not run."""
    kind = type(value)
    if kind is list:
        return children
    if kind is dict:
        keys, _ = _sort_keys(*value)
        return value | dict(zip(keys, children, strict=True))
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


def _built_in(value: dict[Any, Any]) -> Any:
    """Return the class of Python's own that a dict is of."""
    return next(kind for kind in (defaultdict, OrderedDict, dict) if isinstance(value, kind))
