"""Nested values, taken apart into a flat list of leaves and put together again. Nothing here talks to other ranks."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

NATIVE = {np.dtype(name) for name in ["bool", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8"]}


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


Spec = Leaf | Node
NUMBER = Leaf("number")


def flatten(value: Any, leaves: list[Any]) -> Spec:
    """Appends the leaves of `value` to `leaves` and returns what the value is like without them.

    Leaves are Python numbers, and tensors for all that has a dtype. The keys of a dict are visited in sorted order, so
    that two dicts filled in different order have the same spec. What is neither is not appended, and not `known`.
    """
    if isinstance(value, (float, int)):
        leaves.append(value)
        return NUMBER
    if isinstance(value, dict):
        keys, names = _in_order(*value)
        return Node("dict", names, _flatten_all([value[key] for key in keys], leaves))
    if isinstance(value, (Tensor, np.ndarray, np.generic)):
        return _flatten_array(value, leaves)
    if isinstance(value, (list, tuple)):
        marks = tuple(getattr(value, "_fields", None) or map(str, range(len(value))))
        return Node(_container(value), marks, _flatten_all(value, leaves))
    if is_dataclass(value) and not isinstance(value, type):
        names = tuple(field.name for field in fields(value))
        children = _flatten_all([getattr(value, name) for name in names], leaves)
        return Node(f"dataclass {type(value).__name__}", names, children)
    return Leaf(f"object of type {type(value).__name__}")


def rebuild(value: Any, leaves: Iterator[Any]) -> Any:
    """A copy of `value` whose leaves are `leaves`, in the order that `flatten` gave; containers keep type and order."""
    if isinstance(value, (float, int)):
        return np.float64(next(leaves)) if isinstance(value, np.float64) else next(leaves)
    if isinstance(value, dict):
        made, (keys, _) = copy.copy(value), _in_order(*value)
        made.update(zip(keys, _rebuild_all([value[key] for key in keys], leaves), strict=True))
        return made
    if isinstance(value, Tensor):
        return next(leaves)
    if isinstance(value, (np.ndarray, np.generic)):
        array = next(leaves).numpy()
        return array if isinstance(value, np.ndarray) else array[()]
    if isinstance(value, (list, tuple)):
        children = _rebuild_all(value, leaves)
        return type(value)(*children) if hasattr(value, "_fields") else type(value)(children)
    made = object.__new__(type(value))  # not replace(): it calls __init__, which may compute or refuse
    for field in fields(value):
        object.__setattr__(made, field.name, rebuild(getattr(value, field.name), leaves))  # also if it is frozen
    return made


def walk(spec: Spec, path: str = "value") -> Iterator[tuple[str, Spec]]:
    """Every container and leaf with its path, as in `("value['loss']", Leaf(...))`, in the order of `flatten`."""
    yield path, spec
    if isinstance(spec, Node):
        dots = spec.kind not in ("dict", "list", "tuple")
        for name, child in zip(spec.names, spec.children, strict=True):
            yield from walk(child, f"{path}.{name}" if dots else f"{path}[{name}]")


@lru_cache(maxsize=256, typed=True)
def _in_order(*keys: Any) -> tuple[list[Any], tuple[str, ...]]:
    in_order = sorted(keys, key=repr)
    return in_order, tuple(map(repr, in_order))


def _flatten_all(values: Sequence[Any], leaves: list[Any]) -> tuple[Spec, ...]:
    if set(map(type, values)) == {float}:  # metrics: the same, ten times as fast
        leaves.extend(values)
        return (NUMBER,) * len(values)
    return tuple([flatten(value, leaves) for value in values])


def _rebuild_all(values: Sequence[Any], leaves: Iterator[Any]) -> list[Any]:
    if set(map(type, values)) == {float}:
        return list(islice(leaves, len(values)))
    return [rebuild(value, leaves) for value in values]


def _container(value: Any) -> str:
    if hasattr(value, "_fields"):
        return f"namedtuple {type(value).__name__}"
    return "list" if isinstance(value, list) else "tuple"


def _flatten_array(value: Any, leaves: list[Any]) -> Leaf:
    if isinstance(value, Tensor):
        kind, tensor = "tensor", value.detach()
        if tensor.layout != torch.strided or tensor.is_complex() or tensor.is_nested or tensor.is_meta:
            kind = f"{'nested' if tensor.is_nested else tensor.layout} {tensor.dtype} tensor on {tensor.device}"
            return Leaf(kind.replace("torch.", ""))
    else:
        kind, dtype = "array" if isinstance(value, np.ndarray) else "scalar", value.dtype.newbyteorder("=")
        if dtype not in NATIVE or isinstance(value, np.ma.MaskedArray):
            return Leaf(f"{type(value).__name__} of {dtype}")
        tensor = torch.from_numpy(np.array(value, dtype=dtype))  # a copy: torch refuses reversed and read-only arrays
    leaves.append(tensor)
    return Leaf(kind, tensor.dtype, tensor.shape, tensor.device.type)
