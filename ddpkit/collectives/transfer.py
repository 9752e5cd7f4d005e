"""Send tensors and pickled objects to other ranks, unchanged, as bytes: broadcast one rank's, or gather all."""

from __future__ import annotations

import io
import math
import pickle
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ..arguments import plain_index
from ..errors import MismatchError
from ..job import current_job, lifecycle
from ..job.job import Peers, group_of, ranks_of
from ..launch import ranks
from ..torch_internals import is_sharded, untraced
from .consistency import (
    PAYLOAD,
    Numbers,
    add_up,
    check_real,
    communication_device,
    fingerprint_of,
    raise_everywhere,
)
from .differences import explain_sharded
from .tree import (
    Tree,
    bytes_as_tensor,
    explain_not_dense,
    flat_bytes,
    is_dense,
    loses_gradient,
    name_dtype,
)

_BYTES = 4  # that a number of the check's block carries: 32 bits are exact in a float64

# Pickles for other ranks: tensors of any dtype, without the memory around a view, and never one rank's shard.


class ValuePickler(pickle.Pickler):
    """Pickle of a tensor its own elements: torch writes all of a view's storage, and not every dtype."""

    call: str  # that the refusal names

    def reducer_override(self, obj: Any) -> Any:
        """Write a dense tensor as its bytes, refuse a sharded one, and leave everything else to pickle."""
        if isinstance(obj, Tensor) and is_sharded(obj):  # what arrives elsewhere would be one rank's part
            raise TypeError(explain_sharded(self.call, [("a tensor in the value", obj)]))
        if type(obj) is not Tensor or not is_dense(obj):
            return NotImplemented
        data = flat_bytes(obj).cpu().numpy()
        return _from_bytes, (data, obj.dtype, tuple(obj.shape), obj.device.type == "cpu")


def pickled(call: str, value: Any) -> bytes:
    """Pickle a value for other ranks."""
    file = io.BytesIO()
    pickler = ValuePickler(file)
    pickler.call = call
    pickler.dump(value)
    return file.getvalue()


def _from_bytes(data: Any, dtype: torch.dtype, shape: tuple[int, ...], on_cpu: bool) -> Tensor:
    """Make a tensor that was pickled as its bytes, on this rank's device if it was on an accelerator."""
    device = torch.device("cpu") if on_cpu else current_job.get_device()
    return torch.from_numpy(data).view(dtype).reshape(shape).to(device)


# Broadcast: a small value travels in the block of the check, a larger one after it.


def broadcast_value(value: Any, src: Any, peers: Peers | None = None) -> Any:
    """Give every rank the value of rank `src`: there itself, elsewhere a copy. Collective."""
    everyone = ranks_of(peers)
    src = everyone[0] if src is None else plain_index(src)
    call = f"broadcast(src={src!r})"
    is_source = ranks.get_rank() == src
    data = b""
    with raise_everywhere(call, peers):
        if type(src) is not int or src not in everyone:
            expected = f"0 to {len(everyone) - 1}" if peers is None else f"one of {', '.join(map(str, everyone))}"
            raise ValueError(f"src must be a rank, {expected}, got {src!r}.")
        if is_source:
            for path, leaf in Tree(value).leaves().items():
                if isinstance(leaf, Tensor) and loses_gradient(leaf):
                    raise ValueError(f"{call} would lose the gradient of {path}. Pass {path}.detach().")
            data = pickled(call, value)
    if lifecycle.enter_collective() is None:
        return value
    data = broadcast_bytes(call, data, src, peers)
    return value if is_source else pickle.loads(data)


@untraced
def broadcast_bytes(call: str, data: bytes, src: int, peers: Peers | None = None, most: float = math.inf) -> bytes:
    """Give every rank the bytes that rank `src` holds, at most so many; the others hold none. Collective."""
    sums = add_up(fingerprint_of(call), np.append(float(len(data)), _as_words(data, PAYLOAD - 1)), peers)
    size = sums[0]
    if not 0 <= size <= most:
        raise MismatchError(f"{call}: rank {src} sends {size:g} bytes, but this rank expects at most {most:g}.")
    if size <= _BYTES * (PAYLOAD - 1):
        return sums[1:].astype("<u4").tobytes()[: int(size)]
    buffer = bytes_as_tensor(data) if data else torch.empty(int(size), dtype=torch.uint8, device="cpu")
    return broadcast_tensor(buffer, src, peers).numpy().tobytes()


def broadcast_tensor(data: Tensor, src: int, peers: Peers | None = None) -> Tensor:
    """Give every rank the bytes of rank `src`, which are as many as this rank's. Collective."""
    buffer = data.to(communication_device(data.device, peers))
    if buffer.numel():
        with current_job.peer_errors():
            dist.broadcast(buffer, src, group=group_of(peers))
    return buffer.to(data.device)


# Gather: rows of bytes, of any dtype, and uneven in number.


def gather_trees(call: str, value: Any, peers: Peers | None) -> list[Any]:
    """Give every rank the trees of tensors of all ranks. Collective."""
    with raise_everywhere(call, peers):
        tree = Tree(value)
        tensors = tensor_leaves(call, tree)
        for path, tensor in tensors.items():
            if tensor.requires_grad and torch.is_grad_enabled():
                raise ValueError(
                    f"{call} would lose the gradient of {path}. Use gather_batch(), which carries gradients to all "
                    "ranks, or pass .detach()."
                )
        matrices = [as_rows(tensor) for tensor in tensors.values()]
    gathered = gather_rows(fingerprint_of_rows(call, tensors), matrices, peers)
    return [tree.rebuild(map(from_rows, parts, tensors.values())) for parts in gathered]


def gather_objects(call: str, obj: Any, peers: Peers | None = None, *, to_all: bool = True) -> list[Any]:
    """Give every rank, or the first alone, the objects of all ranks, as pickled copies. Collective."""
    with raise_everywhere(call, peers):
        rows = bytes_as_tensor(pickled(call, obj)).unsqueeze(1)
    gathered = gather_rows(fingerprint_of(call), [rows], peers, to_all=to_all)
    if not to_all and ranks.get_rank() != ranks_of(peers)[0]:
        return []
    return [pickle.loads(part.numpy().data) for (part,) in gathered]


def tensor_leaves(call: str, tree: Tree) -> dict[str, Tensor]:
    """Return the tensors of a tree by path; refuse what is none.

    Raises:
        TypeError: If something is no dense tensor.
    """
    tensors: dict[str, Tensor] = tree.leaves()
    for path, tensor in tensors.items():
        problem = explain_not_dense(tensor)
        if problem:
            raise TypeError(
                f"{call} takes dense tensors, and dicts, lists, tuples and dataclasses of them, "
                f"found {problem} at {path}. Use all_gather_object for others."
            )
    return tensors


def fingerprint_of_rows(call: str, tensors: dict[str, Tensor]) -> str:
    """Describe a call by all that must be equal on all ranks: not the lengths."""
    kinds = {}
    for path, tensor in tensors.items():
        kinds[path] = f"{describe_column(tensor)} on {tensor.device.type}"
        if tensor.requires_grad and torch.is_grad_enabled():
            kinds[path] += ", with gradient"
    return fingerprint_of(call, kinds)


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


def gather_rows(
    fingerprint: str, matrices: list[Tensor], peers: Peers | None, check: bool = True, to_all: bool = True
) -> list[list[Tensor]]:
    """Gather matrices of bytes, by rank; if not on all ranks, those of others are arbitrary. Collective.

    Each has its own number of rows on each rank; without check, the same on all. Small ones travel with the check.
    """
    if lifecycle.enter_collective() is None:
        return [[rows.clone() for rows in matrices]]
    everyone = ranks_of(peers)
    counts = np.array([[len(rows) for rows in matrices]] * len(everyone))  # by rank, then by matrix
    if check:
        check_real()
        own = everyone.index(ranks.get_rank())
        is_near = all(rows.device.type == "cpu" for rows in matrices)  # else each would be copied
        room = max(0, PAYLOAD // len(everyone) - len(matrices)) if is_near else 0  # numbers, after a rank's counts
        numbers = np.zeros((len(everyone), len(matrices) + room))
        numbers[own, : len(matrices)] = counts[own]
        if is_near and sum([rows.numel() for rows in matrices]) <= _BYTES * room:
            numbers[own, len(matrices) :] = _as_words(b"".join([rows.numpy().tobytes() for rows in matrices]), room)
        sums = add_up(fingerprint, numbers.reshape(-1), peers).reshape(numbers.shape)
        counts = sums[:, : len(matrices)].astype(np.int64)
        sizes = counts @ [rows.shape[1] for rows in matrices]
        if is_near and sizes.max() <= _BYTES * room:
            words = sums[:, len(matrices) :]
            return [_from_words(*each, matrices) for each in zip(words, counts.tolist(), strict=True)]
    pairs = zip(matrices, counts.T.tolist(), strict=True)
    gathered = [_gather_padded(rows, lengths, peers, to_all) for rows, lengths in pairs]
    return [[parts[i] for parts in gathered] for i in range(len(everyone))]


def _as_words(data: bytes, room: int) -> Any:
    """Write the first bytes as so many numbers."""
    return np.frombuffer(data[: _BYTES * room].ljust(_BYTES * room, b"\0"), "<u4")


def _from_words(words: Numbers, counts: list[int], like: list[Tensor]) -> list[Tensor]:
    """Read matrices with so many rows, each with the columns of another, in memory of their own."""
    shapes = [(count, rows.shape[1]) for count, rows in zip(counts, like, strict=True)]
    sizes = list(map(math.prod, shapes))
    parts = torch.from_numpy(words.astype("<u4").view(np.uint8))[: sum(sizes)].split_with_sizes(sizes)
    return [part.view(shape).clone() for part, shape in zip(parts, shapes, strict=True)]


def _gather_padded(rows: Tensor, counts: list[int], peers: Peers | None, to_all: bool) -> list[Tensor]:
    """Gather a matrix of bytes, padded to the most rows that a rank has. Collective."""
    device = communication_device(rows.device, peers)
    padded = rows.to(device)
    if len(rows) < max(counts):
        padded = torch.zeros((max(counts), rows.shape[1]), dtype=torch.uint8, device=device)
        padded[: len(rows)] = rows
    first = ranks_of(peers)[0]
    receives = to_all or ranks.get_rank() == first
    parts = [torch.empty_like(padded) for _ in counts] if receives else [padded] * len(counts)
    if padded.numel():
        with current_job.peer_errors():
            if to_all:
                dist.all_gather(parts, padded, group=group_of(peers))
            else:
                dist.gather(padded, parts if receives else None, first, group_of(peers))
    pairs = zip(parts, counts, strict=True)
    return [part[:count].to(rows.device) for part, count in pairs]
