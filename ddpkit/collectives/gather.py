"""Gather tensors and pickled objects of all ranks, unchanged, as rows of bytes: of any dtype, and uneven in number.

What is gathered carries no gradient, except by `gather_batch`. That is a linear map, each rank's rows to all ranks, and
its backward is the adjoint: each rank receives the gradients that all ranks have for its own rows, and adds them up.
"""

from __future__ import annotations

import io
import math
import pickle
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..job import current_job, lifecycle
from ..job.job import Peers, group_of, ranks_of, subset_of
from ..launch import ranks
from .broadcast import CompactPickler
from .consistency import (
    CHECK,
    PAYLOAD,
    communication_device,
    fingerprint_of,
    new_block,
    raise_everywhere,
    reduce_in_place,
    sum_block,
)
from .groups import control_device
from .tree import Leaf, bytes_as_tensor, explain_not_dense, flat_bytes, leaves_of, name_dtype, replace_leaves


def gather_trees(call: str, value: Any, peers: Peers | None, check: bool) -> list[Any]:
    """Give every rank the trees of tensors of all ranks. Collective."""
    with raise_everywhere(call, peers):
        tensors = _tensors_of(call, value)
        for path, tensor in tensors.items():
            if tensor.requires_grad and torch.is_grad_enabled():
                raise ValueError(
                    f"{call} would lose the gradient of {path}. Use gather_batch(), which carries gradients to all "
                    "ranks, or pass .detach()."
                )
        matrices = [as_rows(tensor) for tensor in tensors.values()]
    trees = []
    for parts in _gather_rows(_fingerprint(call, tensors), matrices, peers, check):
        leaves = map(from_rows, parts, tensors.values())
        trees.append(replace_leaves(value, leaves))
    return trees


def join_trees(call: str, value: Any, peers: Peers | None, check: bool) -> Any:
    """Join the rows of all ranks' tensors, with their gradients. Collective."""
    with raise_everywhere(call, peers):
        tensors = _tensors_of(call, value)
        for path, tensor in tensors.items():
            if not tensor.dim():
                raise ValueError(f"{call} joins rows, but {path} has no dimensions. Pass value.unsqueeze(0).")
    if not lifecycle.joined():
        joined = [tensor.clone() for tensor in tensors.values()]
    else:
        fingerprint = _fingerprint(call, tensors)
        joined = _Joined.apply(call, fingerprint, peers, check, *tensors.values())  # type: ignore[no-untyped-call]
    return replace_leaves(value, iter(joined))


class _Joined(torch.autograd.Function):
    """Join the rows of all ranks; in backward, add up all ranks' gradients of this rank's rows."""

    @staticmethod
    def forward(
        ctx: Any, call: str, fingerprint: str, peers: Peers | None, check: bool, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        by_rank = _gather_rows(fingerprint, [as_rows(tensor) for tensor in tensors], peers, check)
        # counted where all have met; the ranks may come to the backwards of several calls in another order
        key = current_job.current_session().count(call, subset_of(peers))
        ctx.fingerprint = fingerprint_of(f"the backward of {call}, call number {key.rpartition('/')[2]}")
        ctx.peers = peers
        ctx.check = check
        ctx.counts = []
        joined = []
        for tensor, *parts in zip(tensors, *by_rank, strict=True):
            counts = [len(part) for part in parts]
            ctx.counts.append(counts)
            rows = tensor.new_empty((sum(counts), *tensor.shape[1:]))
            torch.index_select(torch.cat(parts), 0, _turns(counts).to(tensor.device), out=as_rows(rows))
            joined.append(rows)
        needs_gradient = ctx.needs_input_grad[-len(tensors) :]
        ctx.mark_non_differentiable(*[rows for rows, needs in zip(joined, needs_gradient, strict=True) if not needs])
        return tuple(joined)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        if ctx.check:
            sum_block(ctx.fingerprint, new_block(), ctx.peers)
        found: list[Tensor | None] = []
        for i, gradient in enumerate(gradients):
            if ctx.needs_input_grad[4 + i]:
                found.append(_add_up_own(gradient, ctx.counts[i], ctx.peers))
            else:
                found.append(None)
        return None, None, None, None, *found


def _add_up_own(gradient: Tensor, counts: list[int], peers: Peers | None) -> Tensor:
    """Add up, over all ranks, their gradients of this rank's rows of a joined batch. Collective."""
    own = counts[ranks_of(peers).index(ranks.get_rank())]
    by_rank = torch.argsort(_turns(counts)).to(gradient.device)
    rows = as_rows(gradient)[by_rank].to(communication_device(gradient.device, peers))
    received = rows.new_empty((own * len(counts), rows.shape[1]))
    if rows.numel():
        with current_job.exchanging():
            dist.all_to_all_single(received, rows, [own] * len(counts), counts, group_of(peers))
    terms = from_rows(received.to(gradient.device), gradient)
    terms = terms.reshape(len(counts), own, *gradient.shape[1:])
    wide = torch.promote_types(gradient.dtype, torch.float32)
    return terms.sum(0, dtype=wide).to(gradient.dtype)


def _turns(counts: list[int]) -> Tensor:
    """Return, for each row of a batch that a loader dealt to the ranks in turn, its place among their rows by rank."""
    turns = np.concatenate([np.arange(count) for count in counts])
    return torch.from_numpy(np.argsort(turns, kind="stable"))


def gather_objects(call: str, obj: Any, peers: Peers | None = None) -> list[Any]:
    """Give every rank the objects of all ranks, as pickled copies. Collective."""
    with raise_everywhere(call, peers):
        file = io.BytesIO()
        CompactPickler(file, call).dump(obj)
        rows = bytes_as_tensor(file.getvalue()).unsqueeze(1)
    gathered = _gather_rows(fingerprint_of(call), [rows], peers, check=True)
    return [pickle.loads(part.numpy().data) for (part,) in gathered]


def _tensors_of(call: str, value: Any) -> dict[str, Tensor]:
    """Return the tensors of a tree by path; refuse what is none.

    Raises:
        TypeError: If something is no dense tensor.
    """
    tensors: dict[str, Tensor] = leaves_of(value)
    for path, tensor in tensors.items():
        problem = explain_no_tensor(tensor)
        if problem:
            raise TypeError(
                f"{call} takes dense tensors, and dicts, lists, tuples and dataclasses of them, "
                f"found {problem} at {path}. Use all_gather_object for others."
            )
    return tensors


def _fingerprint(call: str, tensors: dict[str, Tensor]) -> str:
    """Describe a call by all that must be equal on all ranks: not the lengths."""
    kinds = {}
    for path, tensor in tensors.items():
        kinds[path] = f"{describe_column(tensor)} on {tensor.device.type}"
        if tensor.requires_grad and torch.is_grad_enabled():
            kinds[path] += ", with gradient"
    return fingerprint_of(call, kinds)


def explain_no_tensor(value: Any) -> str:
    """Say why a leaf is no dense tensor; "" if it is one."""
    if isinstance(value, Tensor):
        return explain_not_dense(value)
    if isinstance(value, Leaf):
        return str(value)
    return type(value).__name__


def describe_column(column: Any) -> str:
    """Describe a tensor, array or list by all that must be equal on all ranks: not the length."""
    if isinstance(column, list):
        return "a list"
    shape = ""
    if column.ndim:
        shape = ", ".join(["any", *map(str, column.shape[1:])])
    if isinstance(column, Tensor):
        return f"{name_dtype(column.dtype)} tensor of shape ({shape})"
    texts = {"U": "str", "S": "bytes"}  # an array's is as long as its longest text
    dtype = texts.get(column.dtype.kind, column.dtype)
    return f"{dtype} array of shape ({shape})"


def as_rows(tensor: Tensor) -> Tensor:
    """View a tensor as a matrix of bytes, one row for each element of its first dimension."""
    length, *rest = tensor.shape or (1,)
    return flat_bytes(tensor).reshape(length, math.prod(rest) * tensor.element_size())


def from_rows(rows: Tensor, like: Tensor) -> Tensor:
    """View rows of bytes as a tensor of the dtype and trailing shape of another."""
    shape = (len(rows), *like.shape[1:]) if like.dim() else ()
    return rows.reshape(-1).view(like.dtype).reshape(shape)


def _gather_rows(fingerprint: str, matrices: list[Tensor], peers: Peers | None, check: bool) -> list[list[Tensor]]:
    """Gather matrices of bytes, by rank. Collective.

    Each has its own number of rows on each rank; without check, the same on all.
    """
    if not lifecycle.joined():
        return [[rows.clone() for rows in matrices]]
    own = [len(rows) for rows in matrices]
    counts = _gather_counts(fingerprint, own, peers) if check else [own] * len(ranks_of(peers))
    gathered = []
    for i, rows in enumerate(matrices):
        gathered.append(_gather_padded(rows, [lengths[i] for lengths in counts], peers))
    return [[parts[rank] for parts in gathered] for rank in range(len(counts))]


def _gather_counts(fingerprint: str, own: list[int], peers: Peers | None) -> list[list[int]]:
    """Give every rank the numbers of rows of all: by rank, then by matrix. Collective."""
    everyone = ranks_of(peers)
    table = np.zeros((len(everyone), len(own)))
    table[everyone.index(ranks.get_rank())] = own
    block = new_block()
    if table.size <= PAYLOAD:
        payload = block[CHECK : CHECK + table.size]
        payload[:] = table.reshape(-1)
        sum_block(fingerprint, block, peers)
        counts = torch.from_numpy(payload.reshape(table.shape)).to(torch.int64)
    else:
        sum_block(fingerprint, block, peers)
        counts = torch.from_numpy(table).to(control_device(peers), torch.int64)
        reduce_in_place(counts, peers=peers)
    found: list[list[int]] = counts.tolist()
    return found


def _gather_padded(rows: Tensor, counts: list[int], peers: Peers | None) -> list[Tensor]:
    """Gather a matrix of bytes, padded to the most rows that a rank has. Collective."""
    device = communication_device(rows.device, peers)
    padded = rows.to(device)
    if len(rows) < max(counts):
        padded = torch.zeros((max(counts), rows.shape[1]), dtype=torch.uint8, device=device)
        padded[: len(rows)] = rows
    parts = [torch.empty_like(padded) for _ in counts]
    if padded.numel():
        with current_job.exchanging():
            dist.all_gather(parts, padded, group=group_of(peers))
    return [part[:count].to(rows.device) for part, count in zip(parts, counts, strict=True)]
