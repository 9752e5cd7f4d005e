"""Gather tensors and pickled objects of all ranks, unchanged, as rows of bytes: of any dtype, and uneven in number."""

from __future__ import annotations

import io
import math
import pickle
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ..launch import ranks
from ..process_group import current_job, lifecycle
from ..process_group.peers import Peers, group_of, ranks_of
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
from .pickling import CompactPickler
from .tensors import bytes_as_tensor, explain_not_dense, flat_bytes, name_dtype
from .tree import Leaf, leaves_of, replace_leaves


def gather_trees(call: str, value: Any, peers: Peers | None = None) -> list[Any]:
    """Give every rank the trees of tensors of all ranks. Collective."""
    with raise_everywhere(call, peers):
        tensors = dict(leaves_of(value, _is_tensor, "value"))
        for path, tensor in tensors.items():
            problem = explain_no_tensor(tensor)
            if problem:
                raise TypeError(
                    f"{call} takes dense tensors, and dicts, lists, tuples and dataclasses of them, "
                    f"found {problem} at {path}. Use all_gather_object for others."
                )
        kinds = {}
        for path, tensor in tensors.items():
            kinds[path] = f"{describe_column(tensor)} on {tensor.device.type}"
        matrices = [as_rows(tensor) for tensor in tensors.values()]
    trees = []
    for parts in _gather_rows(fingerprint_of(call, kinds), matrices, peers):
        leaves = map(from_rows, parts, tensors.values())
        trees.append(replace_leaves(value, _is_tensor, leaves))
    return trees


def gather_objects(call: str, obj: Any, peers: Peers | None = None) -> list[Any]:
    """Give every rank the objects of all ranks, as pickled copies. Collective."""
    with raise_everywhere(call, peers):
        file = io.BytesIO()
        CompactPickler(file, call).dump(obj)
        rows = bytes_as_tensor(file.getvalue()).unsqueeze(1)
    gathered = _gather_rows(fingerprint_of(call), [rows], peers)
    return [pickle.loads(part.numpy().data) for (part,) in gathered]


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


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _gather_rows(fingerprint: str, matrices: list[Tensor], peers: Peers | None) -> list[list[Tensor]]:
    """Gather matrices of bytes, each with its own number of rows on each rank, by rank. Collective."""
    if not lifecycle.joined():
        return [[rows.clone() for rows in matrices]]
    counts = _gather_counts(fingerprint, [len(rows) for rows in matrices], peers)
    gathered = []
    for i, rows in enumerate(matrices):
        gathered.append(_gather_padded(rows, [own[i] for own in counts], peers))
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
    padded = torch.zeros((max(counts), rows.shape[1]), dtype=torch.uint8, device=device)
    padded[: len(rows)] = rows
    parts = [torch.empty_like(padded) for _ in counts]
    if padded.numel():
        with current_job.exchanging():
            dist.all_gather(parts, padded, group=group_of(peers))
    return [part[:count].to(rows.device) for part, count in zip(parts, counts, strict=True)]
