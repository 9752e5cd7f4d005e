"""Moves values between ranks unchanged: rows of tensors, pickled objects, one rank's value with the tensors in it."""

from __future__ import annotations

import io
import pickle
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from . import ranks, runtime
from .agreement import HEAD, ROOM, agree, all_raise, all_reduce, name_ranks, new_block, terms, wire_device
from .errors import MismatchError

_SMALL = 4 * (ROOM - 1)  # bytes that travel with the check: 32 bits are exact in a float64


def gather_rows(mine: str, rows: Tensor) -> list[Tensor]:
    """The ranks' matrices of bytes, each with its own number of rows, on the device of `rows`. Collective."""
    if not runtime.joined():
        return [rows.clone()]
    counts = _counts(mine, len(rows))
    padded = torch.zeros((max(counts), rows.shape[1]), dtype=torch.uint8, device=wire_device(rows.device))
    padded[: len(rows)] = rows
    parts = [torch.empty_like(padded) for _ in counts]
    if padded.numel():
        with runtime.peer_errors():
            dist.all_gather(parts, padded)
    return [part[:count].to(rows.device) for part, count in zip(parts, counts, strict=True)]


def gather_objects(call: str, obj: Any) -> list[Any]:
    """The ranks' objects, as pickled copies. Collective."""
    with all_raise(call):
        rows = _as_bytes(pickle.dumps(obj)).unsqueeze(1)
    return [pickle.loads(part.numpy().tobytes()) for part in gather_rows(terms(call), rows)]


def send(call: str, value: Any, src: int) -> Any:
    """The value of rank `src`: there itself, elsewhere a copy. Collective."""
    tensors: list[Tensor] = []
    with all_raise(call):
        if not isinstance(src, int) or not 0 <= src < ranks.get_world_size():
            raise ValueError(f"src must be a rank, 0 to {ranks.get_world_size() - 1}, got {src!r}.")
        data = _dump(value, tensors) if ranks.get_rank() == src else b""
    block = new_block()
    block[HEAD], block[HEAD + 1 :] = len(data), np.frombuffer(data[:_SMALL].ljust(_SMALL, b"\0"), "<u4")
    lanes = agree(terms(call), block)
    if not runtime.joined():
        return value
    size = int(lanes[0])
    if size <= _SMALL:
        data = lanes[1:].astype("<u4").tobytes()[:size]
    else:
        data = _broadcast(_as_bytes(data.ljust(size)), src).numpy().tobytes()
    if ranks.get_rank() == src:
        for tensor in tensors:
            _broadcast(flat_bytes(tensor), src)
        return value
    notes, body = pickle.loads(data)
    return _Unpickler(io.BytesIO(body), [_receive(note, src) for note in notes]).load()


def in_order(call: str, values: Any, indices: Any, n: int) -> Any:
    """The ranks' values in the order of their indices, which must together be range(n). Collective."""
    with all_raise(call):
        if not isinstance(n, int) or n < 0:
            raise ValueError(f"n must be the length of the dataset, got {n!r}.")
        places = np.asarray(indices.cpu() if isinstance(indices, Tensor) else indices)
        if places.shape != (len(values),) or (len(places) and places.dtype.kind not in "iu"):
            raise ValueError(f"indices must be {len(values)} ints, one for each value, got {_kind(places)}.")
        is_array = isinstance(values, (Tensor, np.ndarray))
        mine = values.detach().cpu().clone() if isinstance(values, Tensor) else values if is_array else list(values)
    shards = gather_objects(call, (places.astype(np.int64), mine))
    _check_range([places for places, _ in shards], n)
    parts = [part for places, part in shards if len(places)] or [mine]  # a rank without any may hold an empty list
    if len(kinds := {_kind(part): None for part in parts}) > 1:
        raise MismatchError(f"{call} needs values of one kind on every rank, got {' and '.join(kinds)}.")
    order = np.argsort(np.concatenate([places for places, _ in shards]))
    if isinstance(parts[0], Tensor):
        ordered = torch.cat(parts)[torch.from_numpy(order)]
        return ordered.to(values.device) if isinstance(values, Tensor) else ordered
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts)[order]
    joint = [value for part in parts for value in part]
    return [joint[place] for place in order]


def is_dense(tensor: Tensor) -> bool:
    """Whether its elements are bytes in memory, one after the other or strided."""
    return tensor.layout == torch.strided and not (tensor.is_meta or tensor.is_nested or tensor.is_quantized)


def flat_bytes(tensor: Tensor) -> Tensor:
    """A dense tensor's memory, row-major; the tensor's own if it is contiguous."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _counts(mine: str, count: int) -> list[int]:
    rank, world_size = ranks.get_rank(), ranks.get_world_size()
    block = new_block()
    if world_size <= ROOM:
        block[HEAD + rank] = count
        return [int(x) for x in agree(mine, block)[:world_size]]
    agree(mine, block)
    counts = torch.zeros(world_size, dtype=torch.int64, device=runtime.control_device())
    counts[rank] = count
    return all_reduce(counts).tolist()


class _Note(NamedTuple):
    """What the other ranks must know of a tensor before it comes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    on_cpu: bool


class _Pickler(pickle.Pickler):
    """Leaves the tensors out, so that they can travel by themselves."""

    def __init__(self, file: io.BytesIO, tensors: list[Tensor]) -> None:
        super().__init__(file)
        self.tensors = tensors
        self.places: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> int | None:
        if type(obj) is not Tensor or not is_dense(obj):  # a Parameter is asked for again by its data
            return None
        if id(obj) not in self.places:
            self.places[id(obj)] = len(self.tensors)
            self.tensors.append(obj)  # keeps it alive, and with it its id
        return self.places[id(obj)]


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: list[Tensor]) -> None:
        super().__init__(file)
        self.tensors = tensors

    def persistent_load(self, place: int) -> Tensor:
        return self.tensors[place]


def _dump(value: Any, tensors: list[Tensor]) -> bytes:
    file = io.BytesIO()
    _Pickler(file, tensors).dump(value)
    notes = [_Note(tensor.dtype, tuple(tensor.shape), tensor.device.type == "cpu") for tensor in tensors]
    return pickle.dumps((notes, file.getvalue()))


def _receive(note: _Note, src: int) -> Tensor:
    tensor = torch.empty(note.shape, dtype=note.dtype, device="cpu" if note.on_cpu else runtime.get_device())
    return _broadcast(flat_bytes(tensor), src).view(note.dtype).reshape(note.shape)


def _broadcast(data: Tensor, src: int) -> Tensor:
    wire = data.to(wire_device(data.device))
    if wire.numel():
        with runtime.peer_errors():
            dist.broadcast(wire, src)
    return wire.to(data.device)


def _as_bytes(data: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(data, np.uint8).copy())


def _kind(part: Any) -> str:
    if isinstance(part, list):
        return "a list"
    shape = ", ".join(["any", *map(str, part.shape[1:])])
    return f"{part.dtype} {'tensor' if isinstance(part, Tensor) else 'array'} of shape ({shape})".removeprefix("torch.")


def _check_range(shards: list[NDArray[np.int64]], n: int) -> None:
    places = np.concatenate(shards)
    inside = (places >= 0) & (places < n)
    counts = np.bincount(places[inside], minlength=n)
    wrong = {
        "missing": np.flatnonzero(counts == 0),
        "repeated": np.flatnonzero(counts > 1),
        "out of range": np.unique(places[~inside]),
    }
    if any(len(found) for found in wrong.values()):
        lines = [f"  {len(found)} {what}: {_places(found, shards)}" for what, found in wrong.items() if len(found)]
        raise ValueError(
            "\n".join([f"The ranks' indices must together be range({n}), each once, but:", *lines])
            + "\nA DistributedSampler repeats or drops samples to even out its shards: use a DistributedEvalSampler."
        )


def _places(found: NDArray[np.int64], shards: list[NDArray[np.int64]]) -> str:
    shown = []
    for place in found[:8]:
        holders = [rank for rank, shard in enumerate(shards) if place in shard]
        shown.append(f"{place} on {name_ranks(holders)}" if holders else f"{place}")
    return ", ".join(shown) + (", …" if len(found) > 8 else "")
