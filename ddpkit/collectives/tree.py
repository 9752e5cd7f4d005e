"""Take nested values apart into leaves, describe these, and put them together again, on this rank alone."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ..torch_internals import has_no_memory, is_dtensor, is_sharded

# Dense tensors: which are, their bytes, and how they are joined.


def explain_not_dense(tensor: Any) -> str:
    """Say why this is no tensor whose elements are simply those in its memory; "" if it is one."""
    if not isinstance(tensor, Tensor):
        return name_type(tensor)
    kind = type(tensor)
    if kind not in (Tensor, nn.Parameter):
        if is_sharded(tensor):
            return "a sharded tensor (fully_shard, FSDP, tensor parallelism; pass tensor.full_tensor())"
        if kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ or nn.parameter.is_lazy(tensor):
            return f"{kind.__name__}, a kind of tensor whose values cannot be read from memory"
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

_NATIVE = set(map(np.dtype, ["bool", "u1", "u2", "u4", "i1", "i2", "i4", "i8", "f2", "f4", "f8"]))
_REAL = {torch.from_numpy(np.zeros(0, dtype)).dtype for dtype in _NATIVE} | {torch.bfloat16}
_NO_CONTAINERS = {float, Tensor, nn.Parameter}
_DICTS = {dict, OrderedDict, defaultdict, Counter}
_TAKES = "numbers, NumPy arrays, dense real tensors, and dicts, lists, tuples and dataclasses of them"


class Container(str):
    """Name a container that was taken apart, with the number of its children: `dict of 2`."""

    __slots__ = ()


class Leaf(NamedTuple):
    """Describe a leaf that can be combined, equal on all ranks. Python's int, float and bool are one kind: number."""

    kind: str
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = ()
    device: str = "cpu"

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


def is_value(value: Any) -> bool:
    """Return whether a value is a number, an array or a tensor: where a tree ends."""
    return isinstance(value, (float, int, Tensor, np.ndarray, np.generic))


class Tree:
    """A nested value, taken apart; the keys of a dict in sorted order, the same on every rank.

    Args:
        value: The value; it is not modified.
        is_leaf: Tells where it ends.
        path: Its path.

    Attributes:
        paths: Paths of what it is made of, as Python writes them, as `value['loss'][0]`.
        parts: What is there: a `Container` before all that is in it, and leaves as they are.
    """

    def __init__(self, value: Any, is_leaf: IsLeaf = is_value, path: str = "value") -> None:
        self.paths: list[str] = []
        self.parts: list[Any] = []
        self._containers: list[tuple[Any, int]] = []  # each with the number of its children
        self._add(value, is_leaf, path)

    def _add(self, value: Any, is_leaf: IsLeaf, path: str) -> None:
        """Add a value and all that is in it."""
        taken = None if is_leaf(value) else _take_apart(value)
        self.paths.append(path)
        if taken is None:
            self.parts.append(value)
            return
        kind, suffixes, children = taken
        self.parts.append(Container(f"{kind} of {len(children)}"))
        self._containers.append((value, len(children)))
        child_paths = [path + suffix for suffix in suffixes]
        if set(map(type, children)) <= _NO_CONTAINERS:  # they need not be looked at one by one
            self.paths += child_paths
            self.parts += children
            return
        for child_path, child in zip(child_paths, children, strict=True):
            self._add(child, is_leaf, child_path)

    def leaves(self) -> dict[str, Any]:
        """Return the leaves by path."""
        pairs = zip(self.paths, self.parts, strict=True)
        return {path: part for path, part in pairs if type(part) is not Container}

    def rebuild(self, leaves: Iterable[Any]) -> Any:
        """Copy the value with other leaves, in this order; containers keep their class and order."""
        remaining = list(leaves)
        containers = self._containers.copy()
        made: list[Any] = []  # in reverse: what a container holds comes before it
        for part in reversed(self.parts):
            if type(part) is not Container:
                made.append(remaining.pop())
                continue
            value, count = containers.pop()
            children = [made.pop() for _ in range(count)]
            made.append(_put_together(value, children))
        return made[0]


class Reducible(Tree):
    """A value that can be reduced, taken apart; its parts are equal on all ranks if they can be combined.

    Attributes:
        parts: A `Container` or a `Leaf` for each path.
        values: The number or plain tensor that is taken for each leaf.

    Raises:
        TypeError: If something in it cannot be reduced; for `call`.
    """

    def __init__(self, call: str, value: Any) -> None:
        super().__init__(value)
        self.values: list[Any] = []
        self._numpy: dict[int, Any] = {}  # arrays and scalars of NumPy, by the index of their leaf
        for i, part in enumerate(self.parts):
            if type(part) is Container:
                continue
            if type(part) in (float, int, bool):
                self.parts[i] = NUMBER
                self.values.append(part)
                continue
            if isinstance(part, (np.ndarray, np.generic)):
                self._numpy[len(self.values)] = part
            self.parts[i], taken = _describe_leaf(part)
            if taken is None:
                raise TypeError(f"{call} takes {_TAKES}, found {self.parts[i]} at {self.paths[i]}.")
            self.values.append(taken)

    def rebuild(self, leaves: Iterable[Any]) -> Any:
        """Copy the value with these leaves, arrays and scalars of NumPy as such again."""
        leaves = list(leaves)
        for i, given in self._numpy.items():
            leaves[i] = _like_numpy(given, leaves[i])
        return super().rebuild(leaves)


def _like_numpy(given: Any, result: Any) -> Any:
    if isinstance(given, np.float64):
        return np.float64(result)
    array = result.numpy()
    return array if isinstance(given, np.ndarray) else array[()]


def _describe_leaf(value: Any) -> tuple[Leaf | str, Any]:
    """Describe a leaf; return also a number or plain tensor to take for it, None if it cannot be reduced."""
    if isinstance(value, Tensor):
        return _describe_tensor(value)
    if isinstance(value, (np.ndarray, np.generic)) and type(value) is not np.float64:
        return _describe_array(value)
    if isinstance(value, int):  # somebody's own kind of number
        return NUMBER, int(value)
    if isinstance(value, float):
        return NUMBER, float(value)
    return f"object of type {name_type(value)}", None


def name_type(value: Any) -> str:
    """Name the type of a leaf that cannot be used, and say what to pass in its place."""
    name = type(value).__name__
    for plain in (dict, list):
        if isinstance(value, plain):
            return f"{name} (pass {plain.__name__}(it))"
    return name


def _describe_tensor(value: Tensor) -> tuple[Leaf | str, Any]:
    is_plain = type(value) is Tensor and value.layout is torch.strided and value.dtype in _REAL
    if not is_plain or value.requires_grad or value.is_nested or value.is_meta:
        value = whole(value)
        problem = explain_not_dense(value)
        if not problem and loses_gradient(value):
            problem = "a tensor whose gradient would be lost (pass it.detach(), or join rows by gather_batch())"
        if not problem and value.dtype not in _REAL:
            hint = " (pass torch.view_as_real(it))" if value.is_complex() else ""
            problem = f"a {name_dtype(value.dtype)} tensor{hint}"
        if problem:
            return problem, None
        value = value.detach().as_subclass(Tensor)
    return _leaf_of("tensor", value.dtype, value.shape, value.device.type), value


def _describe_array(value: Any) -> tuple[Leaf | str, Any]:
    """Describe NumPy's arrays and scalars. The tensors are copies: torch refuses what is reversed or read-only."""
    kind = "scalar" if isinstance(value, np.generic) else "array"
    dtype = value.dtype.newbyteorder("=")
    is_plain = kind == "scalar" or type(value) in (np.ndarray, np.memmap)
    if not is_plain or dtype not in _NATIVE:
        return f"{type(value).__name__} of {dtype} (pass a plain array of real numbers)", None
    tensor = torch.from_numpy(np.array(value, dtype=dtype))
    return Leaf(kind, tensor.dtype, tensor.shape), tensor


# Containers: how they are taken apart and put together. Of other classes of dicts a new one is made of a dict, as is
# usual; one that holds more than its keys is no container, nor is another class of lists.


def _take_apart(value: Any) -> tuple[str, tuple[str, ...], list[Any]] | None:
    """Take a container apart; return None for a value that is none.

    Returns:
        Its kind, what each child adds to its path ("['loss']", "[0]", ".x"), and the children.
    """
    kind = type(value)
    if isinstance(value, dict) and (kind in _DICTS or not _holds_more(value)):
        keys, suffixes = _sort_keys(*value)
        return "dict", suffixes, list(map(value.__getitem__, keys))
    if kind in (list, tuple) or hasattr(kind, "n_sequence_fields"):  # what torch.max and its kin return
        name = "list" if kind is list else "tuple"
        return name, tuple(f"[{i}]" for i in range(len(value))), list(value)
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        suffixes = tuple(f".{name}" for name in kind._fields)
        return f"namedtuple {kind.__name__}", suffixes, list(tuple.__iter__(value))
    if is_dataclass(kind) and not isinstance(value, dict):
        names = [field.name for field in fields(value)]
        children = [getattr(value, name, None) for name in names]
        return f"dataclass {kind.__name__}", tuple(f".{name}" for name in names), children
    return None


def _holds_more(value: dict[Any, Any]) -> bool:
    """Return whether a dict of a class of its own has an attribute with a value that is none of its keys."""
    attributes = getattr(value, "__dict__", {})
    return any(attribute is not None and name not in value for name, attribute in attributes.items())


@lru_cache(maxsize=256, typed=True)
def _sort_keys(*keys: Any) -> tuple[list[Any], tuple[str, ...]]:
    """Sort the keys of a dict by how they print, the same on every rank; return them and their texts in a path."""
    in_order = sorted(keys, key=repr)
    names = list(map(repr, in_order))
    for name, following in pairwise(names):
        if name == following:
            raise TypeError(f"A dict has two keys that print as {name}, so ranks could pair them differently.")
    return in_order, tuple(f"[{name}]" for name in names)


def _put_together(value: Any, children: list[Any]) -> Any:
    """Copy a container that was taken apart, with these children."""
    kind = type(value)
    if kind is list:
        return children
    if isinstance(value, dict):
        new = dict(zip(_sort_keys(*value)[0], children, strict=True))
        if kind in _DICTS:
            made = value.copy()
            dict.update(made, new)  # a Counter's own would add
            return made
        content = {key: new[key] for key in value}
        filled: Any = kind(**content) if is_dataclass(value) else kind(content)
        if list(filled) != list(content):
            raise TypeError(f"Cannot create a {kind.__name__} from a dict: pass dict(it).")
        return filled
    if hasattr(kind, "n_sequence_fields"):
        return kind(children)
    if isinstance(value, tuple):
        return tuple.__new__(kind, children)
    made = object.__new__(kind)
    for field, child in zip(fields(value), children, strict=True):
        object.__setattr__(made, field.name, child)  # also if it is frozen
    return made
