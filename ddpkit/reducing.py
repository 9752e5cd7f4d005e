"""Combines nested values of all ranks: which leaves travel with the check, as lanes, and which after it."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .agreement import HEAD, ROOM, agree, all_raise, all_reduce, new_block, terms, wire_device, world_size
from .lanes import EXTREMES, WIDE, lanes_per_element, pack, pack_numbers, unpack, unpack_numbers, wire_dtype
from .trees import Leaf, Spec, flatten, rebuild, walk

OPS = ("sum", "mean", *EXTREMES)


def combine(value: Any, op: str, weight: Any, check: bool) -> Any:
    """What `all_reduce_mean` and `all_reduce` promise. Collective."""
    leaves: list[Any] = []
    with all_raise(_call(op, weight is not None)):
        if op not in OPS:
            raise ValueError(f"op must be one of {', '.join(OPS)}, got {op!r}.")
        share = None if weight is None else _share(weight)
        spec = flatten(value, leaves)
        unchecked = not check and weight is None and isinstance(spec, Leaf) and spec.dtype is not None
        plan = _plan(op, weight is not None, spec, rides=not unchecked and op not in EXTREMES)
        block = new_block()
        block[HEAD] = 1.0 if share is None else share
        for group, start, end in plan.riders:
            block[start:end] = group.pack(leaves, op, share, rides=True)
        packed = [[group.pack(leaves, op, share) for group in groups] for groups in plan.later]
    lanes = block[HEAD:] * world_size() if unchecked else agree(plan.terms, block)
    total = float(lanes[0])
    if not total:
        raise ValueError(
            "The weights are 0 on every rank, so there is no mean. Give at least one rank a positive weight."
        )
    results: list[Any] = [None] * len(leaves)
    for group, start, end in plan.riders:
        group.unpack(lanes[start - HEAD : end - HEAD], leaves, op, total, results)
    for groups, flats in zip(plan.later, packed, strict=True):
        joint = all_reduce(torch.cat(flats) if len(flats) > 1 else flats[0], greatest=op in EXTREMES)
        for group, part in zip(groups, torch.split(joint, [len(flat) for flat in flats]), strict=True):
            group.unpack(part, leaves, op, total, results)
    return rebuild(value, iter(results))


@dataclass(frozen=True)
class _Group:
    """The leaves of one dtype on one kind of device, which travel as one flat tensor; without dtype, Python numbers."""

    dtype: torch.dtype | None
    members: tuple[int, ...]  # places among the leaves
    sizes: list[int]
    lanes: int  # when added
    wide: bool

    def pack(self, leaves: list[Any], op: str, weight: float | None, rides: bool = False) -> Any:
        mine = [leaves[i] for i in self.members]
        if self.dtype is None:
            numbers = pack_numbers(mine, op, weight)
            wire = torch.int64 if op in EXTREMES else torch.float64
            return numbers if rides else torch.tensor(numbers, dtype=wire, device=wire_device(torch.device("cpu")))
        flat = torch.cat([leaf.to(mine[0].device).reshape(-1) for leaf in mine])
        if rides:
            return pack(flat.cpu(), op, torch.float64, weight).numpy()
        return pack(flat.to(wire_device(flat.device)), op, wire_dtype(self.dtype), weight)

    def unpack(self, lanes: Any, leaves: list[Any], op: str, divisor: float, results: list[Any]) -> None:
        if self.dtype is None:
            found: list[Any] = unpack_numbers(lanes.tolist(), op, divisor)
        else:
            flat = unpack(torch.as_tensor(lanes), self.dtype, op, divisor, self.wide).to(leaves[self.members[0]].device)
            parts = zip(torch.split(flat, self.sizes), self.members, strict=True)
            found = [part.reshape(leaves[i].shape).to(leaves[i].device) for part, i in parts]
        for i, result in zip(self.members, found, strict=True):
            results[i] = result


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
        sizes = [math.prod(leaves[i].shape) for i in mine]
        lanes = sum(sizes) * lanes_per_element(dtype, weighted)
        yield place, _Group(dtype, tuple(mine), sizes, lanes, dtype in WIDE and not weighted)


def _call(op: str, weighted: bool) -> str:
    if op == "mean":
        return "all_reduce_mean(value, weight)" if weighted else "all_reduce_mean(value)"
    return f"all_reduce(value, {op!r})"


def _share(weight: Any) -> float:
    if not isinstance(weight, (numbers.Real, Tensor)):
        raise TypeError(f"weight must be a number, got {type(weight).__name__}.")
    share = float(weight.detach() if isinstance(weight, Tensor) else weight)
    if not 0 <= share < math.inf:
        raise ValueError(f"weight must be finite and not negative, got {share}.")
    return share
