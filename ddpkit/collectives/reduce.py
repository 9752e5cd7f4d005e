"""Reduce nested values over all ranks: take the tree apart, pack its leaves, compare fingerprints, add, and rebuild.

Small values are inline: they travel in the block of the check. Larger ones travel separately, after it.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..process_group.peers import Peers
from .consistency import (
    CHECK,
    PAYLOAD,
    Block,
    communication_device,
    fingerprint_of,
    joined_world_size,
    new_block,
    raise_everywhere,
    reduce_in_place,
    sum_block,
)
from .packing import (
    EXTREMES,
    buffer_dtype,
    is_in_halves,
    normalise,
    pack,
    pack_numbers,
    scale,
    scaled,
    slots_per_element,
    unpack,
    unpack_numbers,
)
from .tensors import concatenate
from .tree import Leaf, Spec, flatten, unflatten, walk

OPS = ("sum", "mean", *EXTREMES)
_LEAST_TOTAL, _GREATEST_TOTAL = 2.0**-40, 2.0**500  # weights of a sum between these cost no digit above 1e-295
_CPU = torch.device("cpu")
_TAKES = "numbers, NumPy arrays, dense real tensors, and dicts, lists, tuples and dataclasses of them"


def reduce_tree(value: Any, op: str, weight: Any, check: bool, peers: Peers | None = None) -> Any:
    """Do what `all_reduce_mean` and `all_reduce` promise. Collective."""
    leaves: list[Any] = []
    weighted = weight is not None
    with raise_everywhere(_name_call(op, weighted), peers):
        _check_op(op)
        if weighted:
            weight = _as_float(weight, peers)
        spec = flatten(value, leaves)
        checked = check or weighted or not _is_one_tensor(spec)
        plan = _make_plan(op, weighted, spec, inline=checked and op not in EXTREMES)
        block = _pack_inline(plan, leaves, op, weight)
        separate = _pack_separate(plan, leaves, op, peers)
    if checked:
        sum_block(plan.fingerprint, block, peers)
        total = float(block[CHECK])
    else:
        total = float(joined_world_size(peers))
    if not total:
        raise ValueError(
            "The weights are 0 on every rank, so there is no mean. Give at least one rank a positive weight."
        )
    reduction = _Reduction(op, leaves, weight, total, peers)
    separate += _unpack_inline(plan, block[CHECK:], reduction)
    if separate:
        _reduce_separately(separate, reduction)
    return unflatten(value, iter(reduction.results))


class _Reduction:
    """Hold one call on this rank, and its results as they come."""

    def __init__(self, op: str, leaves: list[Any], weight: float | None, total: float, peers: Peers | None) -> None:
        self.op = op
        self.leaves = leaves
        self.weight = weight  # this rank's; None without weights
        self.total = total  # of all ranks' weights, 1 each without
        self.peers = peers
        self.world_size = int(total) if weight is None else joined_world_size(peers)
        self.results: list[Any] = [None] * len(leaves)


@dataclass(frozen=True)
class _Group:
    """The leaves of one dtype on one kind of device, packed into one buffer; without dtype, Python numbers."""

    dtype: torch.dtype | None
    members: tuple[int, ...]  # indices of leaves
    sizes: list[int]
    weighted: bool

    @cached_property
    def slots(self) -> int:
        """Count the slots that the group takes when it is added."""
        return sum(self.sizes) * slots_per_element(self.dtype, self.weighted)

    @cached_property
    def float_slots(self) -> int:
        """Count the slots, from the first, that hold floats, which are scaled: an int's are exact as they are."""
        if self.dtype is None or self.dtype.is_floating_point or self.weighted:
            return sum(self.sizes)
        return 0

    def pack_inline(self, leaves: list[Any], op: str) -> Any:
        """Pack into a list or array of float64."""
        if self.dtype is None:
            return pack_numbers(self._own(leaves), op, self.weighted)
        flat = self._join(leaves).cpu()
        return pack(flat, op, torch.float64, self.weighted).numpy()

    def pack(self, leaves: list[Any], op: str, peers: Peers | None) -> Tensor:
        """Pack into a buffer that travels separately, on the device where it does; floats by `_factor()`."""
        dtype = buffer_dtype(self.dtype, op)
        factor = _factor(op, self.weighted, peers)
        if len(self.members) == 1 and dtype == self.dtype and op not in EXTREMES:  # scaled and copied in one pass
            flat = leaves[self.members[0]].reshape(-1)
            return scaled(flat.to(communication_device(flat.device, peers)), factor)
        if self.dtype is None:
            numbers = pack_numbers(self._own(leaves), op, self.weighted)
            buffer = torch.tensor(numbers, dtype=dtype, device=communication_device(_CPU, peers))
        else:
            flat = self._join(leaves)
            buffer = pack(flat.to(communication_device(flat.device, peers)), op, dtype, self.weighted)
        scale(buffer[: self.float_slots], factor)
        return buffer

    def pack_again(self, reduction: _Reduction) -> Tensor:
        """Pack as inline, into a buffer that travels separately; floats by `_factor()`."""
        packed = np.array(self.pack_inline(reduction.leaves, reduction.op), np.float64)
        scale(packed[: self.float_slots], _factor(reduction.op, self.weighted, reduction.peers))
        return torch.from_numpy(packed).to(communication_device(_CPU, reduction.peers))

    def unpack(self, buffer: Any, reduction: _Reduction, divisor: float) -> None:
        """Keep the results of its leaves. The divisor is that of the slots that were scaled."""
        if self.dtype is None:
            found = unpack_numbers(buffer.tolist(), reduction.op, reduction.world_size, divisor)
        else:
            found = self._unpack_tensors(self.dtype, buffer, reduction, divisor)
        for i, result in zip(self.members, found, strict=True):
            reduction.results[i] = result

    def _unpack_tensors(self, dtype: torch.dtype, buffer: Any, reduction: _Reduction, divisor: float) -> list[Any]:
        op, leaves = reduction.op, reduction.leaves
        if isinstance(buffer, np.ndarray):
            buffer = torch.from_numpy(buffer)
        if not self.float_slots:
            divisor = reduction.world_size if op == "mean" else 1.0
        flat = unpack(buffer, dtype, op, divisor, is_in_halves(dtype, self.weighted))
        own = self._own(leaves)
        flat = flat.to(own[0].device)
        parts = torch.split(flat, self.sizes)
        results = [part.view(leaf.shape) for part, leaf in zip(parts, own, strict=True)]
        if flat.device.type != "cpu":  # of which there may be several
            results = [result.to(leaf.device) for result, leaf in zip(results, own, strict=True)]
        return results

    def _own(self, leaves: list[Any]) -> list[Any]:
        return [leaves[i] for i in self.members]

    def _join(self, leaves: list[Any]) -> Tensor:
        """Join the leaves in a new tensor."""
        own = self._own(leaves)
        device = own[0].device
        if device.type != "cpu":  # of which there may be several
            own = [leaf.to(device) for leaf in own]
        return concatenate([leaf.reshape(-1) for leaf in own])


_Separate = list[tuple[list[_Group], list[Tensor]]]  # groups that travel as one tensor, with their buffers


@dataclass(frozen=True)
class _Plan:
    """How values of one spec are packed, on every rank."""

    fingerprint: str
    inline: list[tuple[_Group, slice]]  # with their slots of the payload
    separate: list[list[_Group]]  # travel after the check, each list as one tensor


@lru_cache(maxsize=256)
def _make_plan(op: str, weighted: bool, spec: Spec, inline: bool) -> _Plan:
    """Choose for each group of leaves if it travels inline, the smallest first, as long as there is room."""
    fingerprint = _fingerprint(op, weighted, spec)
    groups = sorted(_groups(spec, weighted), key=lambda each: each[1].slots)
    free = PAYLOAD if inline else 0
    start = 1  # after the weight
    within: list[tuple[_Group, slice]] = []
    separate: dict[tuple[str, torch.dtype], list[_Group]] = {}
    for device, group in groups:
        end = start + group.slots
        if end <= free:
            within.append((group, slice(start, end)))
            start = end
        else:
            dtype = buffer_dtype(group.dtype, op)
            separate.setdefault((device, dtype), []).append(group)
    return _Plan(fingerprint, within, list(separate.values()))


def _fingerprint(op: str, weighted: bool, spec: Spec) -> str:
    """Describe the call and each part of the value; refuse a value with a leaf that cannot be reduced."""
    call = _name_call(op, weighted)
    parts = {}
    for path, node in walk(spec):
        if isinstance(node, Leaf) and not node.known:
            raise TypeError(f"{call} takes {_TAKES}, found {node} at {path}.")
        parts[path] = str(node)
    return fingerprint_of(call, parts)


def _groups(spec: Spec, weighted: bool) -> Iterator[tuple[str, _Group]]:
    """Yield the groups of leaves of one dtype on one kind of device, with that device."""
    leaves = [leaf for _, leaf in walk(spec) if isinstance(leaf, Leaf)]
    groups: dict[tuple[str, torch.dtype | None], list[int]] = {}
    for i, leaf in enumerate(leaves):
        groups.setdefault((leaf.device, leaf.dtype), []).append(i)
    for (device, dtype), members in groups.items():
        sizes = [math.prod(leaves[i].shape) for i in members]
        yield device, _Group(dtype, tuple(members), sizes, weighted)


def _pack_inline(plan: _Plan, leaves: list[Any], op: str, weight: float | None) -> Block:
    """Make the block of the check, with this rank's weight and its inline groups."""
    block = new_block()
    payload = block[CHECK:]
    payload[0] = 1.0 if weight is None else weight
    for group, slots in plan.inline:
        payload[slots] = group.pack_inline(leaves, op)
        if weight is not None:
            scale(payload[slots][: group.float_slots], weight)
    return block


def _pack_separate(plan: _Plan, leaves: list[Any], op: str, peers: Peers | None) -> _Separate:
    separate = []
    for groups in plan.separate:
        buffers = [group.pack(leaves, op, peers) for group in groups]
        separate.append((groups, buffers))
    return separate


def _unpack_inline(plan: _Plan, payload: Block, reduction: _Reduction) -> _Separate:
    """Unpack the inline groups; return those whose sums overflowed, packed to be reduced separately."""
    divisor = reduction.total if reduction.op == "mean" else 1.0
    again: _Separate = []
    for group, slots in plan.inline:
        sums = payload[slots]
        if reduction.world_size == 1 or _is_safe(sums[: group.float_slots], reduction.total):
            group.unpack(sums, reduction, divisor)
        else:
            again.append(([group], [group.pack_again(reduction)]))
    return again


def _is_safe(sums: Block, total: float) -> bool:
    """Return whether sums of floats did not overflow, nor lose digits; every rank sees the same."""
    if not len(sums):
        return True
    if not _LEAST_TOTAL < total < _GREATEST_TOTAL:
        return False
    return bool(np.logical_and.reduce(np.isfinite(sums)))


def _reduce_separately(separate: _Separate, reduction: _Reduction) -> None:
    """Reduce what does not travel with the check, scaled so that no sum overflows, and unpack it. Collective."""
    extreme = reduction.op in EXTREMES
    factor, factor_sum = 1.0, 1.0
    if not extreme:
        factor, factor_sum = _choose_factors(reduction)
    divisor = factor_sum if reduction.op == "mean" else factor
    for groups, buffers in separate:
        if reduction.weight is not None:  # else they are scaled already
            for group, buffer in zip(groups, buffers, strict=True):
                scale(buffer[: group.float_slots], factor)
        joint = concatenate(buffers) if len(buffers) > 1 else buffers[0]
        reduce_in_place(joint, extreme, reduction.peers)
        parts = torch.split(joint, [len(buffer) for buffer in buffers])
        for group, part in zip(groups, parts, strict=True):
            group.unpack(part, reduction, divisor)


def _factor(op: str, weighted: bool, peers: Peers | None) -> float:
    """Return by what floats are multiplied where they are packed; under a weight that is not known yet, so by 1."""
    if weighted or op in EXTREMES:
        return 1.0
    return normalise(None, joined_world_size(peers))[0]


def _choose_factors(reduction: _Reduction) -> tuple[float, float]:
    """Return this rank's factor and the sum of all; the total of the weights may have overflowed. Collective."""
    weight, total, peers = reduction.weight, reduction.total, reduction.peers
    if weight is None or total < math.inf:
        return normalise(weight, total)
    smaller = math.ldexp(weight, -64)
    sums = torch.tensor([smaller], dtype=torch.float64, device=communication_device(_CPU, peers))
    return normalise(smaller, reduce_in_place(sums, peers=peers).item())


def _is_one_tensor(spec: Spec) -> bool:
    return isinstance(spec, Leaf) and spec.dtype is not None


def _name_call(op: str, weighted: bool) -> str:
    if weighted:
        return "all_reduce_mean(value, weight)"
    if op == "mean":
        return "all_reduce_mean(value)"
    return f"all_reduce(value, {op!r})"


def _check_op(op: object) -> None:
    if op not in OPS:
        raise ValueError(f"op must be one of {', '.join(OPS)}, got {op!r}.")


def _as_float(weight: Any, peers: Peers | None) -> float:
    """Check a weight and turn it into a float. Alone, any positive weight is 1: it gives the value itself."""
    if not isinstance(weight, (numbers.Real, Tensor)):
        raise TypeError(f"weight must be a number, got {type(weight).__name__}.")
    if isinstance(weight, Tensor):
        weight = weight.detach()
    number = float(weight)
    if not 0 <= number < math.inf:
        raise ValueError(f"weight must be finite and not negative, got {number}.")
    if number and joined_world_size(peers) == 1:
        return 1.0
    return number
