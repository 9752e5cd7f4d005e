"""Sharded tensors of a state: taken out of it, and shared out among the ranks for writing.

A DTensor (`fully_shard`, tensor parallelism) is cut into pieces, boxes of its elements. Of those that
several ranks hold, one rank writes each.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..collectives.differences import differing_parts, list_lines
from ..collectives.digest import digest
from ..collectives.tensors import local_part
from ..errors import CheckpointError
from ..torch_internals import is_dtensor
from .leaves import path_to

ALIGNMENT = 64  # bytes: each piece begins at a multiple of it in its file

Box = tuple[list[int], list[int]]  # the first index of a piece in each dimension, and its size
Pieces = list[tuple[int, Tensor]]  # that a rank writes: the first byte in its file, and the values


class Piece(NamedTuple):
    """A piece of a sharded tensor in a file.

    Attributes:
        offsets: Its first index in each dimension of the whole tensor.
        sizes: Its size in each dimension.
        file: The rank that wrote it.
        start: Its first byte in that rank's file.
    """

    offsets: list[int]
    sizes: list[int]
    file: int
    start: int


class Layout(NamedTuple):
    """A whole sharded tensor, and its pieces in the files."""

    dtype: torch.dtype
    shape: list[int]
    pieces: list[Piece]


def take_out(name: str, state: Any, found: dict[str, Any], is_wanted: Callable[[Any], bool] = is_dtensor) -> Any:
    """Return a nested state with empty tensors on the meta device in the places of some tensors.

    In the places of NumPy's scalars it has Python's: NumPy's need code of its own to be loaded.

    Args:
        name: The state's path.
        state: The state; it is not changed.
        found: Gets the tensors, by path.
        is_wanted: Tells which values are taken out; by default DTensors.
    """
    if is_wanted(state):
        found[name] = state
        return torch.empty(state.shape, dtype=state.dtype, device="meta")
    if isinstance(state, Mapping):
        items = {}
        for key, value in state.items():
            items[_plain(key)] = take_out(path_to(name, key), value, found, is_wanted)
        return same_mapping(state, items)
    if type(state) in (list, tuple):
        values = [take_out(path_to(name, i), value, found, is_wanted) for i, value in enumerate(state)]
        if all(new is old for new, old in zip(values, state, strict=True)):
            return state
        return type(state)(values)
    return _plain(state)


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    return value


def find_stand_ins(name: str, state: Any) -> Iterator[tuple[str, Tensor]]:
    """Go through the tensors on the meta device in a nested state, by the paths that `take_out()` gave."""
    if isinstance(state, Tensor) and state.is_meta:
        yield name, state
    elif isinstance(state, Mapping):
        for key, value in state.items():
            yield from find_stand_ins(path_to(name, key), value)
    elif type(state) in (list, tuple):
        for i, value in enumerate(state):
            yield from find_stand_ins(path_to(name, i), value)


def same_mapping(state: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """Return a mapping like a state with these items: the state itself if they are its own."""
    if all(new is old and items[new] is state[old] for new, old in zip(items, state, strict=True)):
        return state
    if isinstance(state, OrderedDict):
        copy = OrderedDict(items)
        copy.__dict__.update(state.__dict__)  # the versions that torch keeps beside a model's
        return copy
    return items


def describe(tensors: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Describe sharded tensors as this rank holds them, in plain data for the other ranks."""
    found = {}
    for name, tensor in tensors.items():
        boxes = boxes_of(tensor)
        found[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "boxes": boxes}
    return found


def boxes_of(tensor: Any) -> list[Box]:
    """Return the part of a tensor that this rank holds, as boxes of the whole; at most one.

    (A DTensor is asked as `torch.distributed.checkpoint` asks it, in the same way from torch 2.6 to 2.15.)

    Raises:
        CheckpointError: If it is no such box, or the ranks hold terms of a sum.
    """
    if not is_dtensor(tensor):
        return [([0] * tensor.dim(), list(tensor.shape))]
    if any(placement.is_partial() for placement in tensor.placements):
        raise CheckpointError(
            f"The ranks hold terms of a sum, a DTensor of {_placements(tensor)}, not parts of a tensor: "
            "pass tensor.redistribute(placements=...) or tensor.full_tensor()."
        )
    if tensor.device_mesh.get_coordinate() is None or local_part(tensor).numel() == 0:
        return []
    boxes = [(list(chunk.offsets), list(chunk.sizes)) for chunk in tensor.__create_chunk_list__()]
    if [sizes for _, sizes in boxes] != [list(local_part(tensor).shape)]:
        raise CheckpointError(f"This rank's part of a DTensor of {_placements(tensor)} is not one piece of it.")
    return boxes


def _placements(tensor: Any) -> str:
    return ", ".join(map(str, tensor.placements))


def lay_out(by_rank: list[dict[str, dict[str, Any]]]) -> dict[str, Layout]:
    """Share out the pieces: each is written once, by the rank with the least to write so far.

    Args:
        by_rank: What `describe()` gave on each rank.

    Raises:
        CheckpointError: If the ranks have other tensors, or pieces of one are missing.
    """
    _check_alike(by_rank)
    sizes = [0] * len(by_rank)  # of the ranks' files, in bytes
    layouts = {}
    for name, first in by_rank[0].items():
        holders: dict[tuple[Any, ...], list[int]] = {}
        for rank, tensors in enumerate(by_rank):
            for offsets, lengths in tensors[name]["boxes"]:
                holders.setdefault((tuple(offsets), tuple(lengths)), []).append(rank)
        pieces = []
        for (offsets, lengths), ranks in holders.items():
            rank = min(ranks, key=sizes.__getitem__)
            pieces.append(Piece(list(offsets), list(lengths), rank, sizes[rank]))
            sizes[rank] += _aligned(math.prod(lengths) * first["dtype"].itemsize)
        layout = Layout(first["dtype"], first["shape"], pieces)
        _check_complete(name, layout)
        layouts[name] = layout
    return layouts


def own_pieces(
    tensors: Mapping[str, Any],
    layouts: Mapping[str, Layout],
    rank: int,
) -> Pieces:
    """Return the pieces that a rank writes, in their order in its file."""
    found = []
    for name, layout in layouts.items():
        for piece in layout.pieces:
            if piece.file == rank:
                found.append((piece.start, local_part(tensors[name]).detach()))
    return found


def files_of(layouts: Mapping[str, Layout]) -> list[int]:
    """Return the ranks that write a file, in increasing order."""
    return sorted({piece.file for layout in layouts.values() for piece in layout.pieces})


def as_plain(layouts: Mapping[str, Layout]) -> dict[str, Any]:
    """Convert layouts to plain data, for the file."""
    plain = {}
    for name, layout in layouts.items():
        pieces = [list(piece) for piece in layout.pieces]
        plain[name] = {"dtype": layout.dtype, "shape": layout.shape, "pieces": pieces}
    return plain


def from_plain(data: Mapping[str, Any]) -> dict[str, Layout]:
    """Return layouts from plain data of the right form.

    Raises:
        CheckpointError: If pieces of a tensor are missing.
    """
    layouts = {}
    for name, entry in data.items():
        pieces = [Piece(*piece) for piece in entry["pieces"]]
        layout = Layout(entry["dtype"], entry["shape"], pieces)
        _check_complete(name, layout)
        layouts[name] = layout
    return layouts


def _check_alike(by_rank: list[dict[str, dict[str, Any]]]) -> None:
    """Raise unless all ranks hold parts of the same tensors."""
    texts = {}
    for rank, tensors in enumerate(by_rank):
        texts[rank] = {name: digest([entry["dtype"], entry["shape"]]) for name, entry in tensors.items()}
    differing = differing_parts(texts)
    if differing:
        lines = [f"{name}: {found}" for name, found in differing.items()]
        headline = "Nothing was saved: the ranks hold parts of other tensors:"
        raise CheckpointError(list_lines(headline, lines))


def _check_complete(name: str, layout: Layout) -> None:
    elements = sum(math.prod(piece.sizes) for piece in layout.pieces)
    if elements != math.prod(layout.shape):
        problem = f"{name} has {math.prod(layout.shape)} elements"
        raise CheckpointError(f"{problem}, but its pieces on all ranks have {elements}.")


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
