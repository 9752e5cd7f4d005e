"""Reduce nested values over all ranks: take the tree apart, pack its leaves, compare fingerprints, add, and rebuild.

What fits travels in the block of the check. Else all of it follows, in one all-reduce for each dtype.
"""

from __future__ import annotations

import itertools
import math
import numbers
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..job import lifecycle
from ..job.job import Peers, ranks_of
from .consistency import (
    PAYLOAD,
    Numbers,
    add_up,
    communication_device,
    fingerprint_of,
    raise_everywhere,
    reduce_in_place,
)
from .tree import Leaf, Reducible, concatenate

OPS = ("sum", "mean", "min", "max")
_EXTREMES = ("min", "max")
_NAN = {"min": -(2**63), "max": 2**63 - 1}  # the key that wins
_FLOAT = 2**20  # more than there are ranks
_KINDS = {bool: 0, int: 1, float: _FLOAT}  # of Python's numbers, each wider than the one before; they are added, too
_SLOTS = {("sum", None): 2, ("sum", torch.int64): PAYLOAD}  # of an element; else 1
_WEIGHTS = (1e-20, 1e20)  # times usual numbers they fit a float32
_CPU = torch.device("cpu")


def reduce_tree(
    value: Any, op: str, weight: Any, check: bool, peers: Peers | None = None, call: str | None = None
) -> Any:
    """Do what `all_reduce_mean` and `all_reduce` promise; errors name the `call` of the script. Collective."""
    lifecycle.enter_collective()
    world_size = len(ranks_of(peers))
    call = call or _name_call(op, weight is not None)
    with raise_everywhere(call, peers):
        if op not in OPS:
            raise ValueError(f"op must be one of {', '.join(OPS)}, got {op!r}.")
        if weight is not None:
            weight = _as_float(weight)
        reducible = Reducible(call, value)
        leaves = reducible.values
        if op != "mean":
            _check_ints(leaves, op, world_size)
    if world_size > 1:
        is_checked = check or weight is not None
        plan = _make_plan(call, op, is_checked, tuple(reducible.paths), tuple(reducible.parts))
        results = _reduce(leaves, plan, op, weight, world_size, peers)
    elif weight == 0:
        raise _no_weight()
    else:
        results = [_reduce_alone(leaf, op) for leaf in leaves]
    return reducible.rebuild(results)


class _Group(NamedTuple):
    """The leaves of one dtype on one kind of device, packed into one buffer; without dtype, Python numbers.

    For minima and maxima elements become keys, int64 in their order.
    """

    op: str
    device: str
    dtype: Any
    members: list[int]  # indices of leaves
    shapes: list[tuple[int, ...]]
    sizes: list[int]

    def count_slots(self) -> int:
        """Count the numbers of its buffer if that travels in the block."""
        return sum(self.sizes) * _SLOTS.get((self.op, self.dtype), 1)

    def take(self, leaves: list[Any]) -> list[Any]:
        """Return its members among all leaves."""
        return [leaves[i] for i in self.members]

    def pack(self, leaves: list[Any]) -> Tensor:
        """Pack its members into a new buffer: to be added, ints in float64 or int64, half in float32."""
        flat = self.join(leaves)
        if self.op in _EXTREMES:
            return _keys(flat, self.op)
        if flat.dtype.is_floating_point:
            return flat.to(torch.promote_types(flat.dtype, torch.float32))
        return flat.to(torch.int64 if self.op == "sum" else torch.float64)

    def unpack(self, buffer: Tensor, leaves: list[Any], divisor: float) -> list[Any]:
        """Return the results: floats in their dtype, means of ints in float64, sums of ints in int64.

        The buffer is overwritten.
        """
        if divisor != 1:  # by a plain number, CUDA would multiply with its reciprocal, which rounds twice
            buffer.div_(torch.full((), divisor, dtype=buffer.dtype, device=buffer.device))
        if self.op in _EXTREMES:
            buffer = _from_keys(buffer, self.dtype or torch.float64)
        if self.dtype is None:
            return self.unpack_numbers(buffer.tolist())
        if self.dtype.is_floating_point:
            buffer = buffer.to(self.dtype)
        elif self.op == "sum":
            buffer = buffer.to(torch.int64)
        own = self.take(leaves)
        buffer = buffer.to(own[0].device)
        if any(self.shapes):
            results = list(map(Tensor.view, buffer.split_with_sizes(self.sizes), self.shapes))
        else:
            results = list(buffer.unbind())
        if self.device == "cpu":  # of other kinds there may be several
            return results
        return [result.to(leaf.device) for result, leaf in zip(results, own, strict=True)]

    def join(self, leaves: list[Any]) -> Tensor:
        """Join its members in a new tensor, on the device of the first."""
        if self.dtype is None:
            return torch.tensor(self.pack_numbers(leaves), dtype=torch.float64, device=_CPU)
        own = self.take(leaves)
        if self.device != "cpu":  # there may be several of a kind
            own = [leaf.to(own[0].device) for leaf in own]
        if any(self.shapes):
            return concatenate([leaf.reshape(-1) for leaf in own])
        out = torch.empty(len(own), dtype=self.dtype, device=own[0].device)  # as in `concatenate`
        return torch.stack(own, out=out)

    def pack_numbers(self, leaves: list[Any]) -> list[float]:
        """Pack Python numbers: but for a mean, with their types. The least of negative types is the widest."""
        own = self.take(leaves)
        packed = list(map(float, own))
        if self.op == "mean":
            return packed
        sign = -1 if self.op == "min" else 1
        return [*packed, *(sign * _KINDS[type(number)] for number in own)]

    def unpack_numbers(self, packed: list[float]) -> list[float]:
        """Unpack Python numbers: but for a mean, of the widest type that a rank has."""
        if self.op == "mean":
            return packed
        half = len(packed) // 2
        found = packed[:half]
        for i, kind in enumerate(packed[half:]):
            if abs(kind) < _FLOAT:
                found[i] = int(found[i]) if kind or self.op == "sum" else bool(found[i])
        return found


class _Plan(NamedTuple):
    """How values of one structure are packed, on every rank."""

    fingerprint: str  # "" if it is not checked
    inline: list[list[_Group]]  # travel in the block: Python numbers, and what is on one kind of device
    separate: list[_Group]


@lru_cache(maxsize=256)
def _make_plan(call: str, op: str, is_checked: bool, paths: tuple[str, ...], parts: tuple[Any, ...]) -> _Plan:
    """Gather the leaves of each dtype and kind of device into groups, small ones first."""
    found: dict[Any, list[int]] = {}
    leaves = [part for part in parts if isinstance(part, Leaf)]
    for i, leaf in enumerate(leaves):
        found.setdefault((leaf.device, leaf.dtype), []).append(i)
    groups = []
    for (device, dtype), members in found.items():
        shapes = [leaves[i].shape for i in members]
        groups.append(_Group(op, device, dtype, members, shapes, list(map(math.prod, shapes))))
    if not is_checked and leaves == list(parts) and leaves[0].dtype is not None:  # one tensor
        return _Plan("", [], groups)
    groups.sort(key=_Group.count_slots)
    ends = itertools.accumulate(map(_Group.count_slots, groups))
    count = 0 if op in _EXTREMES else sum(end < PAYLOAD for end in ends)
    fingerprint = fingerprint_of(call, dict(zip(paths, map(str, parts), strict=True)))
    batches: dict[Any, list[_Group]] = {}
    for group in groups[:count]:
        batches.setdefault((group.device, group.dtype is None), []).append(group)
    return _Plan(fingerprint, list(batches.values()), groups[count:])


def _reduce_alone(leaf: Any, op: str) -> Any:
    if isinstance(leaf, Tensor):
        dtype = leaf.dtype
        if not dtype.is_floating_point and op not in _EXTREMES:
            dtype = torch.float64 if op == "mean" else torch.int64
        return leaf.to(dtype, copy=True)
    if op == "mean":
        return float(leaf)
    return leaf * 1 if op == "sum" else leaf  # a sum of bools is an int


def _reduce(
    leaves: list[Any], plan: _Plan, op: str, weight: float | None, world_size: int, peers: Peers | None
) -> list[Any]:
    """Reduce leaves over several ranks. Collective."""
    factor = divisor = 1.0
    if weight is not None:
        factor = weight
    elif op == "mean":
        factor, divisor = normalise(world_size)
    results: dict[int, Any] = {}
    packed = [_pack_inline(leaves, batch, factor) for batch in plan.inline]
    if plan.fingerprint:
        sums = add_up(plan.fingerprint, np.concatenate([[weight or 0.0], *packed]), peers)
        divisor = divisor if weight is None else float(sums[0])
    if not divisor:
        raise _no_weight()
    start = 1
    for group in itertools.chain(*plan.inline):
        end = start + group.count_slots()
        buffer = torch.from_numpy(sums[start:end].copy())
        results.update(zip(group.members, group.unpack(buffer, leaves, divisor), strict=True))
        start = end
    for group in plan.separate:
        buffer = group.pack(leaves)
        buffer = _scale(buffer.to(communication_device(buffer.device, peers)), factor)
        reduce_in_place(buffer, "sum" if op == "mean" else op, peers)
        results.update(zip(group.members, group.unpack(buffer, leaves, divisor), strict=True))
    return [results[i] for i in range(len(leaves))]


def _pack_inline(leaves: list[Any], batch: list[_Group], factor: float) -> Numbers:
    """Pack leaves into floats, multiplied by a factor; they leave their device in one copy."""
    if batch[0].dtype is None:
        found = batch[0].pack_numbers(leaves)
    else:
        found = concatenate([group.join(leaves).to(torch.float64) for group in batch]).tolist()
    packed: Numbers = np.array(found, np.float64)
    _scale(torch.from_numpy(packed), factor)
    return packed


def _scale(buffer: Tensor, factor: float) -> Tensor:
    """Multiply a buffer in place. A factor of 0 silences NaN too: -0.0 adds nothing, not even to -0.0."""
    if not factor:
        return buffer.fill_(-0.0)
    return buffer if factor == 1 else buffer.mul_(factor)


def _keys(flat: Tensor, op: str) -> Tensor:
    """Turn a tensor of any real dtype into keys, greater for greater values; NaN is beyond all others."""
    if not flat.dtype.is_floating_point:
        return flat.to(torch.int64)
    keys = _order_bits(flat.to(torch.float64).view(torch.int64))
    return keys.masked_fill_(flat.isnan(), _NAN[op])


def _from_keys(keys: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype.is_floating_point:
        keys = _order_bits(keys).view(torch.float64)
    return keys.to(dtype)


def _order_bits(bits: Tensor) -> Tensor:
    """Turn the bits of a float64 into an int64 of the same order, and back."""
    return bits ^ ((bits >> 63) & _NAN["max"])


def normalise(count: int) -> tuple[float, float]:
    """Return a power of two by which terms are multiplied, so that their sum does not overflow, and their divisor then.

    The divisor of a mean is in (0.5, 1]. No digit changes, but of what is next to the smallest numbers.
    """
    factor = 2.0 ** -(count - 1).bit_length()
    return factor, count * factor


def _name_call(op: str, weighted: bool) -> str:
    if op != "mean":
        return f"all_reduce(value, {op!r})"
    return "all_reduce_mean(value, weight)" if weighted else "all_reduce_mean(value)"


def _as_float(weight: Any) -> float:
    if not isinstance(weight, (numbers.Real, Tensor)):
        raise TypeError(f"weight must be a number, got {type(weight).__name__}.")
    if isinstance(weight, Tensor):
        weight = weight.detach()
    number = float(weight)
    least, most = _WEIGHTS
    if number and not least <= number <= most:
        raise ValueError(f"weight must be 0, or from {least} to {most}, got {number}.")
    return number


def _no_weight() -> ValueError:
    return ValueError("The weights are 0 on every rank, so there is no mean. Give at least one rank a positive weight.")


def _check_ints(leaves: list[Any], op: str, world_size: int) -> None:
    """Refuse Python ints that would be rounded, by themselves or in their sum."""
    most = 2**53 // world_size if op == "sum" else 2**53
    for leaf in leaves:
        if isinstance(leaf, int) and abs(leaf) > most:
            raise OverflowError(
                f"Ints beyond 2^53 would be rounded, got {leaf} for {op!r} on {world_size} ranks. Subtract a common "
                "start from it, as from a time in nanoseconds, or pass float(it) or torch.tensor(it)."
            )
