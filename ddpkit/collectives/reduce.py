"""Reduce nested values over all ranks: take the tree apart, pack its leaves, compare fingerprints, add, and rebuild.

Small values are inline: they travel in the block of the check. Larger ones travel separately, after it.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ..job import current_job, lifecycle
from ..job.job import Peers, group_of
from .consistency import (
    CHECK,
    PAYLOAD,
    Block,
    communication_device,
    fingerprint_of,
    joined_world_size,
    new_block,
    raise_everywhere,
    sum_block,
)
from .tree import Described, Leaf, concatenate, describe, rebuild

# Keys for minima and maxima: int64 in the order of the values. Ranks take the greatest key. So keys are greater for
# greater values, or for "min" for lesser ones, and greatest for NaN.

_GREATEST = 2**63 - 1
_LEAST = -(2**63)


def tensor_keys(flat: Tensor, op: str) -> Tensor:
    """Turn a tensor of any real dtype into keys."""
    if flat.dtype.is_floating_point:
        bits = flat.to(torch.float64).view(torch.int64)
        return torch.where(flat.isnan(), _GREATEST, _order_bits(bits) ^ _flip(op))
    if flat.dtype == torch.uint64:
        return flat.view(torch.int64) ^ _LEAST ^ _flip(op)
    return flat.to(torch.int64) ^ _flip(op)


def tensor_from_keys(keys: Tensor, dtype: torch.dtype, op: str) -> Tensor:
    """Turn keys back into a tensor of `dtype`."""
    keys = keys ^ _flip(op)
    if dtype.is_floating_point:
        return _order_bits(keys).view(torch.float64).to(dtype)
    if dtype == torch.uint64:
        return (keys ^ _LEAST).view(torch.uint64)
    return keys.to(dtype)


def _flip(op: str) -> int:
    """Return the mask that reverses the order of keys for "min", without the overflow of a minus sign."""
    return -1 if op == "min" else 0


def _order_bits(bits: Tensor) -> Tensor:
    """Turn the bits of a float64 into an int64 of the same order, and back."""
    return bits ^ ((bits >> 63) & _GREATEST)


# Buffers of numbers that ranks can add or compare. To be added, an element takes one slot, a floating-point number. An
# integer of 64 bits takes two, its high and its low half: a sum of halves is exact on up to two million ranks. To be
# compared, elements become keys.

Buffer = Tensor | np.ndarray[Any, np.dtype[np.float64]]
EXTREMES = ("min", "max")
_SLOTS_PER_NUMBER = 4
_LARGEST_EXACT = 2**53  # of the ints that a float64 holds, all up to it
_TYPES = (bool, int, float)
_IN_HALVES = (torch.int64, torch.uint64)
_LOW_HALF = 2**32 - 1
_SMALLEST_FLOAT32 = torch.finfo(torch.float32).tiny


def slots_per_element(dtype: torch.dtype | None, weighted: bool) -> int:
    """Count the slots that an element takes when it is added; without dtype, a Python number."""
    if dtype is None:
        return _SLOTS_PER_NUMBER
    return 2 if is_in_halves(dtype, weighted) else 1


def is_in_halves(dtype: torch.dtype | None, weighted: bool) -> bool:
    """Return whether elements are added as two halves. Under a weight they are floats."""
    return dtype in _IN_HALVES and not weighted


def buffer_dtype(dtype: torch.dtype | None, op: str) -> torch.dtype:
    """Choose the dtype in which large tensors of `dtype` travel, or Python numbers."""
    if op in EXTREMES:
        return torch.int64
    if dtype is None or not dtype.is_floating_point or dtype == torch.float64:
        return torch.float64
    return torch.float32


def pack_numbers(numbers: list[float], op: str, weighted: bool) -> Sequence[float]:
    """Pack Python numbers.

    Added, they take four slots: the number if it is a float, 1 if it is an int, the high half and the low half of an
    int. Under a weight all are floats. Compared, they take two keys: of the number as a float, and of its type.
    """
    if op in EXTREMES:
        _check_compared(numbers, op)
        keys = tensor_keys(torch.tensor(numbers, dtype=torch.float64, device="cpu"), op)
        return [*keys.tolist(), *map(_type_code, numbers)]
    no_ints = [0.0] * (3 * len(numbers))
    if set(map(type, numbers)) <= {float}:
        return numbers + no_ints
    if weighted:
        return [*map(float, numbers), *no_ints]
    _check_ints(numbers)
    floats = [0.0 if isinstance(number, int) else number for number in numbers]
    ints = [number if isinstance(number, int) else 0 for number in numbers]
    are_ints = [isinstance(number, int) for number in numbers]
    highs = [integer >> 32 for integer in ints]
    lows = [integer & _LOW_HALF for integer in ints]
    return [*floats, *are_ints, *highs, *lows]


def unpack_numbers(buffer: list[Any], op: str, world_size: int, divisor: float) -> list[float]:
    """Unpack sums, means, minima or maxima of Python numbers. Sums of ints alone are ints.

    The slots that hold floats are divided by `divisor`, for a sum, too: it takes back the scale.
    """
    if op in EXTREMES:
        keys, codes = torch.tensor(buffer, dtype=torch.int64, device="cpu").chunk(2)
        extremes = tensor_from_keys(keys, torch.float64, op).tolist()
        return [_TYPES[code](number) for number, code in zip(extremes, codes, strict=True)]
    count = len(buffer) // _SLOTS_PER_NUMBER
    floats = [total / divisor for total in buffer[:count]]
    ranks_with_int = buffer[count : 2 * count]
    if not any(ranks_with_int):
        return floats
    highs = buffer[2 * count : 3 * count]
    lows = buffer[3 * count :]
    results: list[float] = []
    for from_floats, ranks, high, low in zip(floats, ranks_with_int, highs, lows, strict=True):
        result: float = int(high) * 2**32 + int(low)
        if op == "mean":
            result /= world_size
        if ranks < world_size:
            result += from_floats
        results.append(result)
    return results


def _type_code(number: float) -> int:
    """Return a number that is greater for a wider type: an extreme of bools and ints is an int."""
    if isinstance(number, float):
        return 2
    return 0 if isinstance(number, bool) else 1


def pack(flat: Tensor, op: str, dtype: torch.dtype, weighted: bool) -> Tensor:
    """Pack a flat tensor into a buffer of `dtype`, or of int64 to be compared; it may be that tensor itself."""
    if op in EXTREMES:
        return tensor_keys(flat, op)
    if not is_in_halves(flat.dtype, weighted):
        return flat.to(dtype)
    bits = flat.view(torch.int64)
    low = bits & _LOW_HALF
    high = bits >> 32
    if flat.dtype == torch.uint64:
        high = high & _LOW_HALF
    return concatenate([high, low]).to(dtype)


def unpack(buffer: Tensor, dtype: torch.dtype, op: str, divisor: float, in_halves: bool) -> Tensor:
    """Unpack the results of what had `dtype`: floats in that dtype, means of ints in float64, sums of ints in int64.

    The buffer is overwritten.
    """
    if op in EXTREMES:
        return tensor_from_keys(buffer, dtype, op)
    if in_halves:
        high, low = buffer.chunk(2)
        if op == "mean":
            return _mean_of_halves(high, low, divisor)
        return _join_halves(high, low)
    result = _divide(buffer, divisor)
    if dtype.is_floating_point:
        return result.to(dtype)
    if op == "mean":
        return result
    return result.to(torch.int64)


def scale(buffer: Buffer, factor: float) -> None:
    """Multiply a buffer, in place. A factor of 0 silences NaN too: -0.0 adds nothing, not even to -0.0."""
    if isinstance(buffer, np.ndarray):
        buffer = torch.from_numpy(buffer)  # NumPy would warn of an overflow
    if not factor:
        buffer[:] = -0.0
    elif factor < _SMALLEST_FLOAT32 and buffer.dtype == torch.float32:  # as float32 it has few digits
        buffer.copy_(buffer.to(torch.float64) * factor)
    elif factor != 1:
        buffer *= factor


def scaled(tensor: Tensor, factor: float) -> Tensor:
    """Multiply by a power of two, in new memory, also what has none of its own. By 1 no bit changes."""
    result = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    if factor == 1:
        return result.copy_(tensor)
    return torch.mul(tensor, factor, out=result)


def normalise(weight: float | None, total: float) -> tuple[float, float]:
    """Multiply this rank's weight and the total of all by one power of two, so that no weighted sum overflows.

    The total is then in [0.5, 1), or 1 if it is a power of two and no rank has a weight. No digit changes, but of what
    is next to the smallest numbers.
    """
    fraction, exponent = math.frexp(total)
    if weight is None:
        weight = 1.0
        if fraction == 0.5:  # two, four, eight ranks: with a sum of 1 nothing is left to divide by
            exponent -= 1
    return math.ldexp(weight, -exponent), math.ldexp(total, -exponent)


def _check_ints(numbers: list[float]) -> None:
    for number in numbers:
        if isinstance(number, int) and not -(2**63) <= number < 2**63:
            raise OverflowError(f"Ints must fit 64 bits to be combined exactly, got {number}. Pass it as a float.")


def _check_compared(numbers: list[float], op: str) -> None:
    for number in numbers:
        if isinstance(number, int) and abs(number) > _LARGEST_EXACT:
            raise OverflowError(
                f"Ints beyond 2^53 are not compared, which as floats would be rounded, got {number} for {op!r}. "
                "Subtract a common start from it, as from a time in nanoseconds, or pass torch.tensor(it)."
            )


def _join_halves(high: Tensor, low: Tensor) -> Tensor:
    """Join the sums of high and low halves to int64."""
    low = low.to(torch.int64)
    high = high.to(torch.int64) + (low >> 32)
    too_large = (high < -(2**31)) | (high >= 2**31)
    if bool(too_large.any()):
        raise OverflowError("The sum of 64-bit integers over all ranks does not fit 64 bits. Reduce them as float64.")
    return (high << 32) + (low & _LOW_HALF)


def _mean_of_halves(high: Tensor, low: Tensor, count: float) -> Tensor:
    """Divide the sums of high and low halves, rounded once, as Python divides ints.

    What the sum and the quotient lose by rounding is exact itself, and is divided and added after them.
    """
    upper = high * 2.0**32
    total = upper + low
    rest = low - (total - upper)
    mean = _divide(total.clone(), count)
    head = mean.to(torch.float32).to(torch.float64)  # products of 24 and of 29 bits with the count are exact
    tail = mean - head
    rest += total - head * count - tail * count
    return mean + _divide(rest, count)


def _divide(buffer: Tensor, divisor: float) -> Tensor:
    """Divide in place. By a plain number, CUDA would multiply with its reciprocal, which rounds twice."""
    if divisor == 1:
        return buffer
    return buffer.div_(torch.full((), divisor, dtype=buffer.dtype, device=buffer.device))


# One reduction, from the value to the results.

OPS = ("sum", "mean", *EXTREMES)
_LEAST_TOTAL, _GREATEST_TOTAL = 2.0**-40, 2.0**500  # weights of a sum between these cost no digit above 1e-295
_CPU = torch.device("cpu")
_TAKES = "numbers, NumPy arrays, dense real tensors, and dicts, lists, tuples and dataclasses of them"


def reduce_tree(value: Any, op: str, weight: Any, check: bool, peers: Peers | None = None) -> Any:
    """Do what `all_reduce_mean` and `all_reduce` promise. Collective."""
    weighted = weight is not None
    with raise_everywhere(_name_call(op, weighted), peers):
        _check_op(op)
        if weighted:
            weight = _as_float(weight, peers)
        reduction = _Reduction(describe(value), op, weight, check, peers)
    reduction.sum_block()
    reduction.unpack_block()
    if reduction.separate:
        reduction.reduce_separate()
    return rebuild(value, reduction.value, reduction.results)


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

    def pack(self, own: list[Any], op: str, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Pack its leaves into a buffer on a device."""
        if self.dtype is None:
            return torch.tensor(pack_numbers(own, op, self.weighted), dtype=dtype, device=device)
        first = own[0].device
        if first.type != "cpu":  # of which there may be several
            own = [leaf.to(first) for leaf in own]
        flat = concatenate([leaf.reshape(-1) for leaf in own])
        return pack(flat.to(device), op, dtype, self.weighted)

    def pack_inline(self, own: list[Any], op: str) -> Any:
        """Pack its leaves into a list or array of float64."""
        if self.dtype is None:
            return pack_numbers(own, op, self.weighted)
        return self.pack(own, op, torch.float64, _CPU).numpy()

    def unpack(self, buffer: Buffer, own: list[Any], op: str, world_size: int, divisor: float) -> list[Any]:
        """Return its results. The divisor is that of the slots that were scaled."""
        if self.dtype is None:
            return unpack_numbers(buffer.tolist(), op, world_size, divisor)
        if isinstance(buffer, np.ndarray):
            buffer = torch.from_numpy(buffer)
        if not self.float_slots:
            divisor = world_size if op == "mean" else 1.0
        flat = unpack(buffer, self.dtype, op, divisor, is_in_halves(self.dtype, self.weighted))
        flat = flat.to(own[0].device)
        parts = torch.split(flat, self.sizes)
        results = [part.view(leaf.shape) for part, leaf in zip(parts, own, strict=True)]
        if flat.device.type != "cpu":  # of which there may be several
            results = [result.to(leaf.device) for result, leaf in zip(results, own, strict=True)]
        return results


class _Plan(NamedTuple):
    """How values of one structure are packed, on every rank."""

    fingerprint: str
    inline: list[tuple[_Group, slice]]  # with their slots of the payload
    separate: list[list[_Group]]  # travel after the check, each list as one tensor


class _Reduction:
    """Reduce one value: plan and pack it, exchange, and unpack.

    Attributes:
        value: What is to be reduced.
        results: Of the leaves, as they come.
        separate: Groups that travel as one tensor, with their buffers.
        total: Of all ranks' weights, 1 each without.
    """

    def __init__(self, value: Described, op: str, weight: float | None, check: bool, peers: Peers | None) -> None:
        self.value = value
        self.op = op
        self.weight = weight
        self.peers = peers
        self.total = 0.0
        weighted = weight is not None
        first = value.parts[0]
        is_one_tensor = isinstance(first, Leaf) and first.dtype is not None
        self.is_checked = check or weighted or not is_one_tensor
        self.plan = _make_plan(op, weighted, self.is_checked and op not in EXTREMES, value.paths, value.parts)
        self.results: list[Any] = [None] * len(value.leaves)
        self.block = self._pack_block()
        self.separate = []
        for groups in self.plan.separate:
            buffers = [self._pack(group, buffer_dtype(group.dtype, op)) for group in groups]
            self.separate.append((groups, buffers))

    @cached_property
    def world_size(self) -> int:
        """Return the number of ranks that take part."""
        return joined_world_size(self.peers)

    def _own(self, group: _Group) -> list[Any]:
        return [self.value.leaves[i] for i in group.members]

    def _pack_block(self) -> Block:
        """Make the block of the check, with this rank's weight and its inline groups."""
        block = new_block()
        payload = block[CHECK:]
        payload[0] = 1.0 if self.weight is None else self.weight
        for group, slots in self.plan.inline:
            payload[slots] = group.pack_inline(self._own(group), self.op)
            if self.weight is not None:
                scale(payload[slots][: group.float_slots], self.weight)
        return block

    def _pack(self, group: _Group, dtype: torch.dtype) -> Tensor:
        """Pack a group that travels separately, floats scaled; under a weight they are once the total is known."""
        own = self._own(group)
        factor = 1.0
        if self.weight is None and self.op not in EXTREMES:
            factor, _ = normalise(None, self.world_size)
        device = communication_device(_CPU if group.dtype is None else own[0].device, self.peers)
        if len(own) == 1 and dtype == group.dtype and self.op not in EXTREMES:  # scaled and copied in one pass
            return scaled(own[0].reshape(-1).to(device), factor)
        buffer = group.pack(own, self.op, dtype, device)
        scale(buffer[: group.float_slots], factor)
        return buffer

    def _unpack(self, group: _Group, buffer: Buffer, divisor: float) -> None:
        found = group.unpack(buffer, self._own(group), self.op, self.world_size, divisor)
        for i, result in zip(group.members, found, strict=True):
            self.results[i] = result

    def sum_block(self) -> None:
        """Compare with all ranks, unless this goes unchecked, and sum what travels with that. Collective."""
        if not self.is_checked:
            self.total = float(self.world_size)
            return
        sum_block(self.plan.fingerprint, self.block, self.peers)
        self.total = float(self.block[CHECK])
        if self.weight is None:
            self.world_size = int(self.total)
        if not self.total:
            raise ValueError(
                "The weights are 0 on every rank, so there is no mean. Give at least one rank a positive weight."
            )

    def unpack_block(self) -> None:
        """Unpack the inline groups; those whose sums overflowed are packed again, to be reduced separately."""
        payload = self.block[CHECK:]
        divisor = self.total if self.op == "mean" else 1.0
        for group, slots in self.plan.inline:
            sums = payload[slots]
            if self.world_size == 1 or _is_safe(sums[: group.float_slots], self.total):
                self._unpack(group, sums, divisor)
            else:
                self.separate.append(([group], [self._pack(group, torch.float64)]))

    def reduce_separate(self) -> None:
        """Reduce what does not travel with the check, scaled so that no sum overflows, and unpack it. Collective."""
        extreme = self.op in EXTREMES
        factor, factor_sum = (1.0, 1.0) if extreme else self._choose_factors()
        divisor = factor_sum if self.op == "mean" else factor
        for groups, buffers in self.separate:
            if self.weight is not None:  # else they are scaled already
                for group, buffer in zip(groups, buffers, strict=True):
                    scale(buffer[: group.float_slots], factor)
            joint = buffers[0] if len(buffers) == 1 else concatenate(buffers)
            reduce_in_place(joint, extreme, self.peers)
            parts = torch.split(joint, [len(buffer) for buffer in buffers])
            for group, part in zip(groups, parts, strict=True):
                self._unpack(group, part, divisor)

    def _choose_factors(self) -> tuple[float, float]:
        """Return this rank's factor and the sum of all; the total of the weights may have overflowed. Collective."""
        if self.weight is None or self.total < math.inf:
            return normalise(self.weight, self.total)
        smaller = math.ldexp(self.weight, -64)
        sums = torch.tensor([smaller], dtype=torch.float64, device=communication_device(_CPU, self.peers))
        return normalise(smaller, reduce_in_place(sums, peers=self.peers).item())


@lru_cache(maxsize=256)
def _make_plan(op: str, weighted: bool, inline: bool, paths: tuple[str, ...], parts: tuple[Any, ...]) -> _Plan:
    """Choose for each group of leaves if it travels inline, the smallest first, as long as there is room.

    Raises:
        TypeError: If a leaf cannot be reduced.
    """
    call = _name_call(op, weighted)
    for path, part in zip(paths, parts, strict=True):
        if isinstance(part, Leaf) and not part.known:
            raise TypeError(f"{call} takes {_TAKES}, found {part} at {path}.")
    groups = sorted(_groups(parts, weighted), key=lambda each: each[1].slots)
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
    fingerprint = fingerprint_of(call, dict(zip(paths, map(str, parts), strict=True)))
    return _Plan(fingerprint, within, list(separate.values()))


def _groups(parts: tuple[Any, ...], weighted: bool) -> Iterator[tuple[str, _Group]]:
    """Yield the groups of leaves of one dtype on one kind of device, with that device."""
    leaves = [part for part in parts if isinstance(part, Leaf)]
    groups: dict[tuple[str, torch.dtype | None], list[int]] = {}
    for i, leaf in enumerate(leaves):
        groups.setdefault((leaf.device, leaf.dtype), []).append(i)
    for (device, dtype), members in groups.items():
        sizes = [math.prod(leaves[i].shape) for i in members]
        yield device, _Group(dtype, tuple(members), sizes, weighted)


def _is_safe(sums: Block, total: float) -> bool:
    """Return whether sums of floats did not overflow, nor lose digits; every rank sees the same."""
    if not len(sums):
        return True
    if not _LEAST_TOTAL < total < _GREATEST_TOTAL:
        return False
    return bool(np.logical_and.reduce(np.isfinite(sums)))


def reduce_in_place(buffer: Tensor, greatest: bool = False, peers: Peers | None = None) -> Tensor:
    """Add up a tensor in place, on every rank, or take the greatest; return it. Collective.

    Never AVG: on gloo it is missing, wrong or raises, by torch's version and the dtype.
    """
    if lifecycle.joined() and buffer.numel():
        op = dist.ReduceOp.MAX if greatest else dist.ReduceOp.SUM
        with current_job.peer_errors():
            dist.all_reduce(buffer, op, group=group_of(peers))
    return buffer


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
