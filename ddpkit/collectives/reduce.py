"""Reduce nested values over all ranks: take the tree apart, pack its leaves, compare fingerprints, add, and rebuild.

What fits travels in the block of the check. Else all of it follows, in one all-reduce for each dtype.
"""

from __future__ import annotations

import itertools
import math
import numbers
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..job import current_job, lifecycle
from ..job.job import Peers, group_of
from .consistency import (
    CHECK,
    PAYLOAD,
    communication_device,
    fingerprint_of,
    joined_world_size,
    new_block,
    raise_everywhere,
    sum_block,
)
from .tree import Leaf, concatenate, describe, rebuild

OPS = ("sum", "mean", "min", "max")
_EXTREMES = ("min", "max")
_TAKES = "numbers, NumPy arrays, dense real tensors, and dicts, lists, tuples and dataclasses of them"
_TYPES = (bool, int, float)  # of Python's numbers, each wider than the one before
_GREATEST = 2**63 - 1
_LOW_HALF = 2**32 - 1
_SLOTS = {("sum", None): 4, ("sum", torch.int64): 2}  # of an element; else 1
_WEIGHTS = (1e-20, 1e20)  # times usual numbers they fit a float32
_CPU = torch.device("cpu")


def reduce_tree(value: Any, op: str, weight: Any, check: bool, peers: Peers | None = None) -> Any:
    """Do what `all_reduce_mean` and `all_reduce` promise. Collective."""
    world_size = joined_world_size(peers)
    call = _name_call(op, weight is not None)
    with raise_everywhere(call, peers):
        if op not in OPS:
            raise ValueError(f"op must be one of {', '.join(OPS)}, got {op!r}.")
        if weight is not None:
            weight = _as_float(weight)
        described = describe(value)
        leaves = described.leaves
        plan = _make_plan(call, op, described.paths, described.parts)
        if op != "mean":
            _check_ints(leaves, op)
    if world_size > 1:
        is_one_tensor = isinstance(described.parts[0], Leaf) and described.parts[0].dtype is not None
        is_checked = check or weight is not None or not is_one_tensor
        results = _reduce(leaves, plan, op, weight, is_checked, world_size, peers)
    elif weight == 0:
        raise _no_weight()
    else:
        results = [_reduce_alone(leaf, op) for leaf in leaves]
    return rebuild(value, described, results)


class _Group(NamedTuple):
    """The leaves of one dtype on one kind of device, packed into one buffer; without dtype, Python numbers."""

    dtype: torch.dtype | None
    members: list[int]  # indices of leaves
    sizes: list[int]


class _Plan(NamedTuple):
    """How values of one structure are packed, on every rank."""

    fingerprint: str
    groups: list[_Group]
    inline: int  # so many of them, from the first, may travel in the block


@lru_cache(maxsize=256)
def _make_plan(call: str, op: str, paths: tuple[str, ...], parts: tuple[Any, ...]) -> _Plan:
    """Gather the leaves of each dtype and kind of device into groups, small ones first.

    Raises:
        TypeError: If a leaf cannot be reduced.
    """
    for path, part in zip(paths, parts, strict=True):
        if isinstance(part, Leaf) and not part.known:
            raise TypeError(f"{call} takes {_TAKES}, found {part} at {path}.")
    made: dict[tuple[str, torch.dtype | None], _Group] = {}
    leaves = [part for part in parts if isinstance(part, Leaf)]
    for i, leaf in enumerate(leaves):
        group = made.setdefault((leaf.device, leaf.dtype), _Group(leaf.dtype, [], []))
        group.members.append(i)
        group.sizes.append(math.prod(leaf.shape))
    groups = sorted(made.values(), key=lambda group: sum(group.sizes))
    slots = [sum(group.sizes) * _SLOTS.get((op, group.dtype), 1) for group in groups]
    inline = sum(end < PAYLOAD for end in itertools.accumulate(slots))
    fingerprint = fingerprint_of(call, dict(zip(paths, map(str, parts), strict=True)))
    return _Plan(fingerprint, groups, 0 if op in _EXTREMES else inline)


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
    leaves: list[Any],
    plan: _Plan,
    op: str,
    weight: float | None,
    is_checked: bool,
    world_size: int,
    peers: Peers | None,
) -> list[Any]:
    """Reduce leaves over several ranks. Collective."""
    inline = plan.inline if is_checked else 0
    factor = divisor = 1.0
    if weight is not None:
        factor = weight
    elif op == "mean":
        factor, divisor = normalise(world_size)
    owned = [[leaves[i] for i in group.members] for group in plan.groups]
    buffers = []
    for i, (group, own) in enumerate(zip(plan.groups, owned, strict=True)):
        home = _CPU if group.dtype is None else own[0].device
        device = _CPU if i < inline else communication_device(home, peers)
        buffer = _pack(own, group.dtype, op, i < inline, device)
        buffers.append(_scale(buffer, factor))
    if is_checked:
        total = _check_and_add(plan.fingerprint, buffers, inline, weight, peers)
        divisor = divisor if weight is None else total
    if not divisor:
        raise _no_weight()
    for buffer in buffers[inline:]:
        reduce_in_place(buffer, op in _EXTREMES, peers)
    results: list[Any] = [None] * len(leaves)
    for group, own, buffer in zip(plan.groups, owned, buffers, strict=True):
        for i, result in zip(group.members, _unpack(buffer, own, group, op, divisor), strict=True):
            results[i] = result
    return results


def _check_and_add(
    fingerprint: str, buffers: list[Tensor], inline: int, weight: float | None, peers: Peers | None
) -> float:
    """Compare with all ranks, and add up the first buffers in place; return the total of the weights. Collective."""
    block = new_block()
    block[CHECK] = weight or 0.0
    sizes = [len(buffer) for buffer in buffers[:inline]]
    payload = torch.from_numpy(block[CHECK + 1 :])[: sum(sizes)]
    if inline:
        torch.cat(buffers[:inline], out=payload)
        buffers[:inline] = torch.split(payload, sizes)
    sum_block(fingerprint, block, peers)
    return float(block[CHECK])


def reduce_in_place(buffer: Tensor, greatest: bool = False, peers: Peers | None = None) -> Tensor:
    """Add up a tensor in place, on every rank, or take the greatest; return it. Collective.

    Never AVG: on gloo it is missing, wrong or raises, by torch's version and the dtype.
    """
    if lifecycle.joined() and buffer.numel():
        op = dist.ReduceOp.MAX if greatest else dist.ReduceOp.SUM
        with current_job.peer_errors():
            dist.all_reduce(buffer, op, group=group_of(peers))
    return buffer


# Buffers. Sums of ints of 64 bits are those of their high and low halves, exact on up to two million ranks. For minima
# and maxima elements become keys, int64 in their order, of which ranks take the greatest.


def _pack(own: list[Any], dtype: torch.dtype | None, op: str, is_inline: bool, device: torch.device) -> Tensor:
    """Pack leaves of a dtype into a new buffer: to be added, of float64, or of float32 for large ones of it or half."""
    if dtype is None:
        kind = torch.int64 if op in _EXTREMES else torch.float64
        return torch.tensor(_pack_numbers(own, op), dtype=kind, device=device)
    first = own[0].device
    if first.type != "cpu":  # of which there may be several
        own = [leaf.to(first) for leaf in own]
    flat = concatenate([leaf.reshape(-1) for leaf in own]).to(device)
    if op in _EXTREMES:
        return _keys(flat, op)
    if op == "sum" and dtype == torch.int64:
        flat = concatenate([flat >> 32, flat & _LOW_HALF])
    if is_inline or not dtype.is_floating_point:
        return flat.to(torch.float64)
    return flat.to(torch.promote_types(dtype, torch.float32))


def _pack_numbers(own: list[float], op: str) -> list[float]:
    """Pack Python numbers: to be compared, with their types; to be added, the floats, and the ints in halves."""
    if op == "mean":
        return list(map(float, own))
    if op in _EXTREMES:
        keys = _keys(torch.tensor(own, dtype=torch.float64, device="cpu"), op)
        return [*keys.tolist(), *(_TYPES.index(type(number)) for number in own)]
    are_floats = [isinstance(number, float) for number in own]
    floats = [number if isinstance(number, float) else 0.0 for number in own]
    ints = [0 if isinstance(number, float) else number for number in own]
    return [*are_floats, *floats, *(number >> 32 for number in ints), *(number & _LOW_HALF for number in ints)]


def _scale(buffer: Tensor, factor: float) -> Tensor:
    """Multiply a buffer in place. A factor of 0 silences NaN too: -0.0 adds nothing, not even to -0.0."""
    if not factor:
        return buffer.fill_(-0.0)
    return buffer if factor == 1 else buffer.mul_(factor)


def _unpack(buffer: Tensor, own: list[Any], group: _Group, op: str, divisor: float) -> list[Any]:
    """Return the results of a group of leaves; the buffer is overwritten."""
    if op == "mean" and divisor != 1:  # by a plain number, CUDA would multiply with its reciprocal, which rounds twice
        buffer.div_(torch.full((), divisor, dtype=buffer.dtype, device=buffer.device))
    if group.dtype is None:
        return _unpack_numbers(buffer, op)
    flat = _unpack_elements(buffer, group.dtype, op).to(own[0].device)
    parts = torch.split(flat, group.sizes)
    results = [part.view(leaf.shape) for part, leaf in zip(parts, own, strict=True)]
    if flat.device.type != "cpu":  # of which there may be several
        results = [result.to(leaf.device) for result, leaf in zip(results, own, strict=True)]
    return results


def _unpack_elements(buffer: Tensor, dtype: torch.dtype, op: str) -> Tensor:
    """Unpack floats in their dtype, means of ints in float64, sums of ints in int64."""
    if op in _EXTREMES:
        return _from_keys(buffer, dtype, op)
    if dtype.is_floating_point:
        return buffer.to(dtype)
    if op == "mean":
        return buffer
    if dtype != torch.int64:
        return buffer.to(torch.int64)
    high, low = buffer.to(torch.int64).chunk(2)
    high = high + (low >> 32)
    if bool(((high < -(2**31)) | (high >= 2**31)).any()):
        raise OverflowError("The sum of 64-bit integers over all ranks does not fit 64 bits. Reduce them as float64.")
    return (high << 32) + (low & _LOW_HALF)


def _unpack_numbers(buffer: Tensor, op: str) -> list[float]:
    """Unpack Python numbers: extremes of the widest type that a rank has, and sums, of ints alone exact ones."""
    if op == "mean":
        return buffer.tolist()
    if op in _EXTREMES:
        keys, kinds = buffer.chunk(2)
        extremes = _from_keys(keys, torch.float64, op).tolist()
        return [_TYPES[kind](number) for number, kind in zip(extremes, kinds.tolist(), strict=True)]
    sums: list[float] = []
    for are_floats, total, high, low in buffer.view(4, -1).t().tolist():
        whole = int(high) * 2**32 + int(low)
        if not are_floats:
            sums.append(whole)
        else:
            sums.append(total + whole if whole else total)  # -0.0 stays
    return sums


def _keys(flat: Tensor, op: str) -> Tensor:
    """Turn a tensor of any real dtype into keys: greater for greater values, or for "min" for lesser ones, and NaN."""
    if not flat.dtype.is_floating_point:
        return flat.to(torch.int64) ^ _flip(op)
    keys = _order_bits(flat.to(torch.float64).view(torch.int64)) ^ _flip(op)
    return torch.where(flat.isnan(), _GREATEST, keys)


def _from_keys(keys: Tensor, dtype: torch.dtype, op: str) -> Tensor:
    keys = keys ^ _flip(op)
    if dtype.is_floating_point:
        return _order_bits(keys).view(torch.float64).to(dtype)
    return keys.to(dtype)


def _flip(op: str) -> int:
    """Return the mask that reverses the order of keys for "min", without the overflow of a minus sign."""
    return -1 if op == "min" else 0


def _order_bits(bits: Tensor) -> Tensor:
    """Turn the bits of a float64 into an int64 of the same order, and back."""
    return bits ^ ((bits >> 63) & _GREATEST)


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


def _check_ints(leaves: list[Any], op: str) -> None:
    """Refuse Python ints that would be rounded."""
    bits = 53 if op in _EXTREMES else 63
    for leaf in leaves:
        if isinstance(leaf, int) and abs(leaf) > 2**bits:
            raise OverflowError(
                f"Ints beyond 2^{bits} would be rounded, got {leaf} for {op!r}. Subtract a common start from it, as "
                "from a time in nanoseconds, or pass float(it) or torch.tensor(it)."
            )
