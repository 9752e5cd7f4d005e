"""Moves values between ranks unchanged: rows of tensors, pickled objects, one rank's value with the tensors in it."""

from __future__ import annotations

import io
import math
import pickle
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from ..errors import MismatchError
from ..launch import ranks
from ..process_group import lifecycle
from ..torch_internals import has_no_memory
from .consistency import HEAD, ROOM, agree, all_raise, all_reduce, compare, name_ranks, new_block, terms, wire_device
from .sharded import UnshardedPickler
from .sync import check_copies
from .tensors import bytes_as_tensor, concatenate, explain_not_dense, flat_bytes, is_dense, name_dtype
from .tree import Leaf, leaves_of, plain_index, with_leaves

_SMALL = 4 * (ROOM - 1)  # bytes that travel with the check: 32 bits are exact in a float64
# torch 2.6 cannot index tensors of other dtypes
_INDEXED = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
_INDEXED |= {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128}


def gather_trees(call: str, value: Any) -> list[Any]:
    """Give every rank the trees of tensors of all ranks. Collective."""
    with all_raise(call):
        tensors = dict(leaves_of(value, _is_tensor, "value"))
        for path, tensor in tensors.items():
            if problem := _problem(tensor):
                raise TypeError(
                    f"{call} takes dense tensors, and dicts, lists, tuples and dataclasses of them, "
                    f"found {problem} at {path}. Use all_gather_object for others."
                )
        kinds = {path: f"{_kind(tensor)} on {tensor.device.type}" for path, tensor in tensors.items()}
        matrices = [_as_rows(tensor) for tensor in tensors.values()]
    gathered = []
    for parts in _gather_rows(terms(call, kinds), matrices):
        leaves = map(_from_rows, parts, tensors.values())
        gathered.append(with_leaves(value, _is_tensor, leaves))
    return gathered


def gather_objects(call: str, obj: Any) -> list[Any]:
    """Give every rank the objects of all ranks, as pickled copies. Collective."""
    with all_raise(call):
        file = io.BytesIO()
        _Pickler(file, call).dump(obj)
        rows = bytes_as_tensor(file.getvalue()).unsqueeze(1)
    return [pickle.loads(part.numpy().tobytes()) for (part,) in _gather_rows(terms(call), [rows])]


def send(value: Any, src: Any) -> Any:
    """Give every rank the value of rank `src`: there itself, elsewhere a copy. Collective."""
    src = plain_index(src)
    call = f"broadcast(src={src!r})"
    tensors: list[Tensor] = []
    with all_raise(call):
        if type(src) is not int or not 0 <= src < ranks.get_world_size():
            raise ValueError(f"src must be a rank, 0 to {ranks.get_world_size() - 1}, got {src!r}.")
        data = _dump(call, value, tensors) if ranks.get_rank() == src else b""
    block = new_block()
    block[HEAD], block[HEAD + 1 :] = len(data), np.frombuffer(data[:_SMALL].ljust(_SMALL, b"\0"), "<u4")
    lanes = agree(terms(call), block)
    if not lifecycle.joined():
        return value
    size = int(lanes[0])
    if size <= _SMALL:
        data = lanes[1:].astype("<u4").tobytes()[:size]
    else:
        data = _broadcast(bytes_as_tensor(data.ljust(size)), src).numpy().tobytes()
    if ranks.get_rank() == src:
        for tensor in tensors:
            _broadcast(flat_bytes(tensor), src)
        return value
    notes, body = pickle.loads(data)
    return _Unpickler(io.BytesIO(body), [_receive(note, src) for note in notes]).load()


def in_order(values: Any, indices: Any, n: Any) -> Any:
    """Put the ranks' values in the order of their indices, which must together be range(n). Collective."""
    n = plain_index(n)
    call = f"gather_exact(n={n!r})"
    with all_raise(call):
        if type(n) is not int or n < 0:
            raise ValueError(f"n must be the length of the dataset, got {n!r}.")
        places = _as_places(indices)
        own = dict(leaves_of(values, _is_column, "values"))
        columns = [_as_column(call, path, column, len(places)) for path, column in own.items()]
        tree = with_leaves(values, _is_column, iter(columns))
    shards = gather_objects(call, (places, tree))
    _check_range([places for places, _ in shards], n)
    # a rank without samples may pass an empty list whatever the others have
    trees = {rank: tree for rank, (places, tree) in enumerate(shards) if len(places)} or {ranks.get_rank(): tree}
    found = {rank: dict(leaves_of(tree, _is_column, "values")) for rank, tree in trees.items()}
    kinds = {rank: {path: _kind(part) for path, part in parts.items()} for rank, parts in found.items()}
    if difference := compare(call, kinds):
        raise MismatchError(difference)
    tree = trees.get(ranks.get_rank(), next(iter(trees.values())))
    order = np.argsort(np.concatenate([places for places, _ in shards]))
    ordered = []
    for path, _ in leaves_of(tree, _is_column, "values"):
        column = _join([parts[path] for parts in found.values()], order)
        mine = own.get(path)
        if isinstance(column, Tensor) and isinstance(mine, Tensor):
            column = column.to(mine.device)
        ordered.append(column)
    return with_leaves(tree, _is_column, iter(ordered))


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _is_column(value: Any) -> bool:
    """Return whether this is taken as the samples' results, rather than as a container of several such."""
    if isinstance(value, tuple):  # of columns, or of results? nobody knows: refused
        return not hasattr(type(value), "_fields")
    return isinstance(value, (Tensor, np.ndarray, list))


def _problem(value: Any) -> str:
    """Say why this is no dense tensor; "" if it is one."""
    if isinstance(value, Tensor):
        return explain_not_dense(value)
    return str(value) if isinstance(value, Leaf) else type(value).__name__


def _as_places(indices: Any) -> NDArray[np.int64]:
    places = indices.detach().cpu() if isinstance(indices, Tensor) and not _problem(indices) else indices
    places = np.asarray(places)
    empty = places.shape == (0,)
    if isinstance(indices, np.ma.MaskedArray) or places.ndim != 1 or (places.dtype.kind not in "iu" and not empty):
        raise ValueError(f"indices must be ints in one dimension, got {_kind(places)}.")
    return places.astype(np.int64)


def _as_column(call: str, path: str, column: Any, count: int) -> Any:
    """Check one result per index, and make it ready to be pickled."""
    problem = _problem(column)
    if isinstance(column, list) or type(column) in (np.ndarray, np.memmap):
        problem = ""
    if not problem and isinstance(column, (Tensor, np.ndarray)) and not column.ndim:
        problem = "a tensor without dimensions"
    if problem:
        raise TypeError(
            f"{call} takes the results of the indices in one tensor, array or list, or such columns in a dict, "
            f"namedtuple or dataclass, found {problem} at {path}."
        )
    if len(column) != count:
        results = "1 result" if len(column) == 1 else f"{len(column)} results"
        found = "there is 1 index" if count == 1 else f"there are {count} indices"
        raise ValueError(f"{path} holds {results}, but {found}: {call} takes one for each.")
    if isinstance(column, Tensor):
        return column.detach().as_subclass(Tensor).cpu()
    return column if isinstance(column, np.ndarray) else list(column)


def _join(parts: list[Any], order: NDArray[np.int64]) -> Any:
    if isinstance(parts[0], Tensor):
        rows = concatenate(parts)
        places = torch.from_numpy(order)
        if rows.dtype in _INDEXED:
            return rows[places]
        return _from_rows(_as_rows(rows)[places], rows)
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts)[order]
    joint = [value for part in parts for value in part]
    return [joint[place] for place in order]


def _as_rows(tensor: Tensor) -> Tensor:
    """View a tensor as a matrix of bytes, one row for each element of its first dimension."""
    length, *rest = tensor.shape or (1,)
    return flat_bytes(tensor).reshape(length, math.prod(rest) * tensor.element_size())


def _from_rows(rows: Tensor, like: Tensor) -> Tensor:
    shape = (len(rows), *like.shape[1:]) if like.dim() else ()
    return rows.reshape(-1).view(like.dtype).reshape(shape)


def _gather_rows(mine: str, matrices: list[Tensor]) -> list[list[Tensor]]:
    """Gather matrices of bytes, each with its own number of rows on each rank, by rank. Collective."""
    if not lifecycle.joined():
        return [[rows.clone() for rows in matrices]]
    counts = _counts(mine, [len(rows) for rows in matrices])
    gathered = [_gather_padded(rows, [each[i] for each in counts]) for i, rows in enumerate(matrices)]
    return [[parts[rank] for parts in gathered] for rank in range(len(counts))]


def _gather_padded(rows: Tensor, counts: list[int]) -> list[Tensor]:
    padded = torch.zeros((max(counts), rows.shape[1]), dtype=torch.uint8, device=wire_device(rows.device))
    padded[: len(rows)] = rows
    parts = [torch.empty_like(padded) for _ in counts]
    if padded.numel():
        with lifecycle.peer_errors():
            dist.all_gather(parts, padded)
    return [part[:count].to(rows.device) for part, count in zip(parts, counts, strict=True)]


def _counts(mine: str, own: list[int]) -> list[list[int]]:
    """Tell all ranks how many rows each has in each matrix: by rank, then by matrix. Collective."""
    world_size = ranks.get_world_size()
    table = np.zeros((world_size, len(own)))
    table[ranks.get_rank()] = own
    block = new_block()
    if table.size <= ROOM:
        block[HEAD : HEAD + table.size] = table.reshape(-1)
        counts = torch.from_numpy(agree(mine, block)[: table.size])
    else:
        agree(mine, block)
        counts = all_reduce(torch.from_numpy(table).to(lifecycle.control_device(), torch.int64))
    found: list[list[int]] = counts.to(torch.int64).reshape(table.shape).tolist()
    return found


class _Note(NamedTuple):
    """What the other ranks must know of a tensor before it comes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    on_cpu: bool


class _Pickler(UnshardedPickler):
    """Writes of a view its own elements only, for which torch writes all of its storage, and any dtype."""

    def reducer_override(self, obj: Any) -> Any:
        super().reducer_override(obj)
        if not isinstance(obj, Tensor):
            return NotImplemented
        if type(obj) is not Tensor or not is_dense(obj):
            return NotImplemented
        if not _can_be_pickled(obj.dtype):
            copy = flat_bytes(obj).cpu().clone()
            return _from_bytes, (copy, obj.dtype, tuple(obj.shape), obj.device, obj.requires_grad)
        if obj.untyped_storage().nbytes() <= obj.nbytes and not has_no_memory(obj):
            return NotImplemented
        whole: Any = obj.detach().clone().requires_grad_(obj.requires_grad)
        return whole.__reduce_ex__(2)


@lru_cache
def _can_be_pickled(dtype: torch.dtype) -> bool:
    """Return whether torch has told pickle of a dtype; it has not of its youngest ones."""
    try:
        pickle.loads(pickle.dumps(torch.empty(0, dtype=dtype, device="cpu")))
    except Exception:
        return False
    return True


def _from_bytes(
    data: Tensor, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device, requires_grad: bool
) -> Tensor:
    """Make a tensor that was pickled as its bytes."""
    return data.view(dtype).reshape(shape).to(device).requires_grad_(requires_grad)


class _TensorPickler(_Pickler):
    """Leaves the tensors out, so that they can travel by themselves."""

    def __init__(self, file: io.BytesIO, call: str, tensors: list[Tensor]) -> None:
        super().__init__(file, call)
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


def _dump(call: str, value: Any, tensors: list[Tensor]) -> bytes:
    file = io.BytesIO()
    _TensorPickler(file, call, tensors).dump(value)
    check_copies(call, file.getvalue(), lambda data: _Unpickler(io.BytesIO(data), tensors).load())
    notes = [_Note(tensor.dtype, tuple(tensor.shape), tensor.device.type == "cpu") for tensor in tensors]
    return pickle.dumps((notes, file.getvalue()))


def _receive(note: _Note, src: int) -> Tensor:
    tensor = torch.empty(note.shape, dtype=note.dtype, device="cpu" if note.on_cpu else lifecycle.get_device())
    return _broadcast(flat_bytes(tensor), src).view(note.dtype).reshape(note.shape)


def _broadcast(data: Tensor, src: int) -> Tensor:
    wire = data.to(wire_device(data.device))
    if wire.numel():
        with lifecycle.peer_errors():
            dist.broadcast(wire, src)
    return wire.to(data.device)


def _kind(part: Any) -> str:
    if isinstance(part, list):
        return "a list"
    shape = ", ".join(["any", *map(str, part.shape[1:])]) if part.ndim else ""
    if isinstance(part, Tensor):
        return f"{name_dtype(part.dtype)} tensor of shape ({shape})"
    texts = {"U": "str", "S": "bytes"}  # an array's is as long as its longest text
    return f"{texts.get(part.dtype.kind, part.dtype)} array of shape ({shape})"


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
