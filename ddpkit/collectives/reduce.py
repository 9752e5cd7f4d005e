"""Combines nested values of all ranks: which leaves travel with the check, as lanes, and which after it."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .consistency import HEAD, ROOM, agree, all_raise, all_reduce, new_block, terms, wire_device, world_size
from .packing import (
    EXTREMES,
    WIDE,
    Lanes,
    lanes_per_element,
    pack,
    pack_numbers,
    safe_scale,
    scale,
    unpack,
    unpack_numbers,
    wire_dtype,
)
from .tensors import concatenate
from .tree import Leaf, Spec, flatten, rebuild, walk

OPS = ("sum", "mean", *EXTREMES)
_USUAL = (2.0**-40, 2.0**500)  # weights whose sum is between these lose no digit but of numbers below 1e-295


def combine(value: Any, op: str, weight: Any, check: bool) -> Any:
    """Do what `all_reduce_mean` and `all_reduce` promise. Collective."""
    leaves: list[Any] = []
    weighted = weight is not None
    with all_raise(_call(op, weighted)):
        if op not in OPS:
            raise ValueError(_bad_op(op))
        share = _share(weight) if weighted else None
        spec = flatten(value, leaves)
        unchecked = not check and not weighted and isinstance(spec, Leaf) and spec.dtype is not None
        plan = _plan(op, weighted, spec, rides=not unchecked and op not in EXTREMES)
        block = new_block()
        block[HEAD] = 1.0 if share is None else share
        for group, start, end in plan.riders:
            block[start:end] = group.pack(leaves, op)
            if share is not None:
                scale(block[start : start + group.scaled], share)
        packed = [[group.pack_tensor(leaves, op) for group in groups] for groups in plan.later]
    lanes = block[HEAD:] * world_size() if unchecked else agree(plan.terms, block)
    total = float(lanes[0])
    world = world_size() if weighted else int(total)
    if not total:
        raise ValueError(
            "The weights are 0 on every rank, so there is no mean. Give at least one rank a positive weight."
        )
    results: list[Any] = [None] * len(leaves)
    later = list(zip(plan.later, packed, strict=True))
    for group, start, end in plan.riders:
        mine = lanes[start - HEAD : end - HEAD]
        if world == 1 or _is_safe(mine[: group.scaled], total):
            group.unpack(mine, leaves, op, world, total if op == "mean" else 1.0, results)
        else:
            again = torch.from_numpy(np.array(group.pack(leaves, op), np.float64))
            later.append(([group], [again.to(wire_device(again.device))]))
    if not later:
        return rebuild(value, iter(results))
    factor, sum_of_factors = (1.0, 1.0) if op in EXTREMES else _factors(share, total)
    for groups, flats in later:
        for group, flat in zip(groups, flats, strict=True):
            scale(flat[: group.scaled], factor)
        joint = all_reduce(concatenate(flats) if len(flats) > 1 else flats[0], greatest=op in EXTREMES)
        for group, part in zip(groups, torch.split(joint, [len(flat) for flat in flats]), strict=True):
            group.unpack(part, leaves, op, world, sum_of_factors if op == "mean" else factor, results)
    return rebuild(value, iter(results))


def _is_safe(lanes: Lanes, total: float) -> bool:
    """Return whether the sums did not overflow, nor lose digits; every rank sees the same."""
    return not len(lanes) or (_USUAL[0] < total < _USUAL[1] and bool(np.logical_and.reduce(np.isfinite(lanes))))


def _factors(share: float | None, total: float) -> tuple[float, float]:
    """Choose this rank's factor and tell the sum of all; the total of the weights may have overflowed. Collective."""
    if share is None or total < math.inf:
        return safe_scale(share, total)
    less = math.ldexp(share, -64)
    sums = torch.tensor([less], dtype=torch.float64, device=wire_device(torch.device("cpu")))
    return safe_scale(less, all_reduce(sums).item())


@dataclass(frozen=True)
class _Group:
    """The leaves of one dtype on one kind of device, which travel as one flat tensor; without dtype, Python numbers."""

    dtype: torch.dtype | None
    members: tuple[int, ...]  # places among the leaves
    sizes: list[int]
    weighted: bool

    @cached_property
    def wide(self) -> bool:
        """Whether each element takes two lanes."""
        return self.dtype in WIDE and not self.weighted

    @cached_property
    def lanes(self) -> int:
        """How many lanes there are, when added."""
        return sum(self.sizes) * lanes_per_element(self.dtype, self.weighted)

    @cached_property
    def scaled(self) -> int:
        """How many of them, from the first, hold floats: an int's are exact as they are."""
        floats = self.dtype is None or self.dtype.is_floating_point or self.weighted
        return sum(self.sizes) if floats else 0

    def pack(self, leaves: list[Any], op: str) -> Any:
        """Make the lanes as a list or array of float64."""
        if self.dtype is None:
            return pack_numbers(self._mine(leaves), op, self.weighted)
        return pack(self._flat(leaves).cpu(), op, torch.float64, self.weighted).numpy()

    def pack_tensor(self, leaves: list[Any], op: str) -> Tensor:
        """Make the lanes where and as they travel by themselves."""
        if self.dtype is None:
            wire = torch.int64 if op in EXTREMES else torch.float64
            return torch.tensor(self.pack(leaves, op), dtype=wire, device=wire_device(torch.device("cpu")))
        flat = self._flat(leaves)
        return pack(flat.to(wire_device(flat.device)), op, wire_dtype(self.dtype), self.weighted)

    def unpack(self, lanes: Any, leaves: list[Any], op: str, world: int, divisor: float, results: list[Any]) -> None:
        """Put the results in their places. Lanes of ints that were not scaled are divided by the world size."""
        if self.dtype is None:
            found: list[Any] = unpack_numbers(lanes.tolist(), op, world, divisor)
        else:
            if not self.scaled:
                divisor = world if op == "mean" else 1.0
            lanes = torch.from_numpy(lanes) if isinstance(lanes, np.ndarray) else lanes
            flat = unpack(lanes, self.dtype, op, divisor, self.wide).to(leaves[self.members[0]].device)
            parts = zip(torch.split(flat, self.sizes), self.members, strict=True)
            found = [part.reshape(leaves[i].shape).to(leaves[i].device) for part, i in parts]
        for i, result in zip(self.members, found, strict=True):
            results[i] = result

    def _mine(self, leaves: list[Any]) -> list[Any]:
        return [leaves[i] for i in self.members]

    def _flat(self, leaves: list[Any]) -> Tensor:
        """Join the leaves in a new tensor."""
        mine = self._mine(leaves)
        return concatenate([leaf.to(mine[0].device).reshape(-1) for leaf in mine])


@dataclass(frozen=True)
class _Plan:
    """What is done with every value of one spec, on every rank."""

    terms: str
    riders: list[tuple[_Group, int, int]]  # travel with the check, with their place in the block
    later: list[list[_Group]]  # travel after it, each list as one tensor


@lru_cache(maxsize=256)
def _plan(op: str, weighted: bool, spec: Spec, rides: bool) -> _Plan:
    call, nodes = _call(op, weighted), list(walk(spec))
    for path, node in nodes:
        if isinstance(node, Leaf) and not node.known:
            raise TypeError(
                f"{call} takes numbers, NumPy arrays, dense real tensors, and dicts, lists, tuples and dataclasses of "
                f"them, found {node} at {path}."
            )
    riders: list[tuple[_Group, int, int]] = []
    start, end = HEAD + 1, HEAD + ROOM if rides else 0
    later: dict[tuple[str, torch.dtype], list[_Group]] = {}
    for place, group in sorted(_groups(spec, weighted), key=lambda each: each[1].lanes):
        if start + group.lanes <= end:
            riders.append((group, start, start + group.lanes))
            start += group.lanes
        else:
            wire = torch.float64 if group.dtype is None else wire_dtype(group.dtype)
            later.setdefault((place, torch.int64 if op in EXTREMES else wire), []).append(group)
    return _Plan(terms(call, {path: str(node) for path, node in nodes}), riders, list(later.values()))


def _groups(spec: Spec, weighted: bool) -> Iterator[tuple[str, _Group]]:
    leaves = [leaf for _, leaf in walk(spec) if isinstance(leaf, Leaf)]
    members: dict[tuple[str, torch.dtype | None], list[int]] = {}
    for i, leaf in enumerate(leaves):
        members.setdefault((leaf.device, leaf.dtype), []).append(i)
    for (place, dtype), mine in members.items():
        yield place, _Group(dtype, tuple(mine), [math.prod(leaves[i].shape) for i in mine], weighted)


def _call(op: str, weighted: bool) -> str:
    if op == "mean":
        return "all_reduce_mean(value, weight)" if weighted else "all_reduce_mean(value)"
    return f"all_reduce(value, {op!r})"


def _bad_op(op: object) -> str:
    near = get_close_matches(op, OPS, n=1) if isinstance(op, str) else []
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"op must be one of {', '.join(OPS)}, got {op!r}.{hint}"


def _share(weight: Any) -> float:
    if not isinstance(weight, (numbers.Real, Tensor)):
        raise TypeError(f"weight must be a number, got {type(weight).__name__}.")
    share = float(weight.detach() if isinstance(weight, Tensor) else weight)
    if not 0 <= share < math.inf:
        raise ValueError(f"weight must be finite and not negative, got {share}.")
    return 1.0 if share and world_size() == 1 else share  # alone, any weight gives the value itself
