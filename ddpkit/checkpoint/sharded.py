"""Sharded tensors of a state: taken out of it, and shared out among the ranks for writing.

A DTensor (`fully_shard`, tensor parallelism) is cut into pieces, boxes of its elements. Of those that
several ranks hold, one rank writes each.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..collectives.differences import differing_parts, list_lines
from ..collectives.digest import digest
from ..collectives.tree import flat_bytes, local_part
from ..errors import CheckpointError
from ..torch_internals import is_dtensor
from .files import SummedFile, go_on, open_file, unreadable, verify, write_durably
from .leaves import explain_loss, path_to

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


# Files of the pieces of sharded tensors: one for each rank, in a folder beside the checkpoint.
#
# A file holds the bytes of its pieces, one after the other, and a last line with their checksum.

_FOLDER = re.compile(r"(step-\d{9,})\.[0-9a-f]{16}")
_PAUSE = 0.02  # seconds between looks for the other ranks' files
_PATIENCE = 300.0  # seconds in which those must have grown
_PATIENCE_AT_END = 10.0  # the same, when this process is ending: a rank may have been killed


class PiecesMissingError(CheckpointError):
    """Other ranks have not written their pieces."""


def new_folder(path: Path) -> Path:
    """Name a folder for the pieces of a checkpoint, as no other is named."""
    return path.with_name(f"{path.stem}.{os.urandom(8).hex()}")


def is_folder_of(path: Path, name: Any) -> bool:
    """Return whether this is the name of a folder for the pieces of a checkpoint."""
    if not isinstance(name, str):
        return False
    match = _FOLDER.fullmatch(name)
    return match is not None and match[1] == path.stem


def delete_unused(folder: Path, of: str = "", used: str = "") -> None:
    """Delete folders of pieces that no checkpoint uses.

    Args:
        folder: The folder of the checkpoints.
        of: A checkpoint's name without suffix, which uses no other than `used`. Of the others it is
            only seen whether they are there.
        used: The name of the folder that is used.
    """
    for name in os.listdir(folder):
        match = _FOLDER.fullmatch(name)
        if match is None or name == used:
            continue
        if match[1] == of or not (folder / f"{match[1]}.pt").is_file():
            shutil.rmtree(folder / name, ignore_errors=True)


def write_pieces(
    folder: Path,
    rank: int,
    pieces: Pieces,
    check: Callable[[], None] = go_on,
    confirm: Callable[[], None] = go_on,
) -> None:
    """Write the file of a rank; it gets its name when it is on the disk.

    Args:
        folder: The folder of the pieces.
        rank: The rank.
        pieces: The first byte and the values of each piece, in their order in the file.
        check: Called now and then; what it raises ends the writing.
        confirm: Called when all is on the disk, before the file gets its name; may raise.

    Raises:
        CheckpointError: If it cannot be written.
    """

    def write(file: BinaryIO) -> None:
        summed = SummedFile(file, check)
        position = 0
        for start, values in pieces:
            data = flat_bytes(values).cpu().numpy()
            summed.write(bytes(start - position))  # up to where it begins
            summed.write(data.data)
            position = start + data.nbytes
        summed.end()

    path = folder / _name_of(rank)
    if folder.is_symlink():
        raise CheckpointError(f"Cannot write {path}: {folder} is a link, which no Checkpointer made.")
    try:
        write_durably(path, write, confirm)
    except BaseException as error:
        with suppress(OSError):
            open(folder / _failed_name_of(rank), "xb").close()  # rank 0 waits for one of the two
        if not isinstance(error, OSError):
            raise
        raise CheckpointError(f"Cannot write {path}: {error}. Earlier checkpoints are complete.") from error


def wait_for_pieces(
    folder: Path,
    ranks: Iterable[int],
    check: Callable[[], None],
    is_ending: Callable[[], bool],
) -> None:
    """Wait until the files of these ranks are on the disk.

    Args:
        folder: The folder of the pieces.
        ranks: The ranks that write a file.
        check: Called now and then; what it raises ends the wait.
        is_ending: Whether this process is about to end, and should not wait long for ranks that write nothing.

    Raises:
        PiecesMissingError: If one could not write it, or writes nothing for too long.
    """
    sizes: dict[str, int] = {}
    since = time.monotonic()
    while True:
        check()
        now = _sizes_in(folder)
        missing = [rank for rank in ranks if _name_of(rank) not in now]
        if not missing:
            return
        failed = [rank for rank in missing if _failed_name_of(rank) in now]
        if failed:
            raise PiecesMissingError(
                f"{_ranks(failed)} could not write into {folder}. Earlier checkpoints are complete."
            )
        if now != sizes:
            sizes = now
            since = time.monotonic()
        patience = _PATIENCE_AT_END if is_ending() else _PATIENCE
        if time.monotonic() - since > patience:
            raise PiecesMissingError(
                f"{_ranks(missing)} wrote nothing into {folder} for {patience:g} s. Earlier checkpoints are complete."
            )
        time.sleep(_PAUSE)


def verify_pieces(folder: Path, ranks: Iterable[int]) -> None:
    """Compare the files of these ranks with their checksums.

    Raises:
        CheckpointError: If one is not there or damaged.
    """
    for rank in ranks:
        path = folder / _name_of(rank)
        try:
            with open_file(path) as file:
                verify(file)
        except (OSError, ValueError) as error:
            raise unreadable(path, error) from error


class SavedPieces:
    """The sharded tensors of a checkpoint, read when they are asked for.

    Args:
        folder: The folder of the pieces.
        layouts: The tensors, by path.
        stand_ins: What stands for them in the checkpoint's states, by path.
    """

    def __init__(self, folder: Path, layouts: Mapping[str, Layout], stand_ins: Mapping[str, Tensor]) -> None:
        self._folder = folder
        self._stand_ins = stand_ins  # which live as long as their numbers are used
        self._layouts = {id(tensor): layouts[name] for name, tensor in stand_ins.items() if name in layouts}

    def holds(self, saved: Any) -> bool:
        """Return whether a value of the states stands for a tensor in the files."""
        return id(saved) in self._layouts

    @torch.no_grad()
    def read_into(self, name: str, target: Tensor, saved: Tensor) -> None:
        """Overwrite this rank's part of a tensor, or all of a plain one.

        Args:
            name: The tensor's, for messages.
            target: Of the saved one's shape. It may be spread over the ranks in another way.
            saved: A tensor of the states.

        Raises:
            CheckpointError: If a file cannot be read, or the dtype here does not hold its values.
        """
        layout = self._layouts.get(id(saved))
        if layout is None:
            layout = Layout(saved.dtype, list(saved.shape), [Piece([0] * saved.dim(), list(saved.shape), -1, 0)])
        part = local_part(target).detach()
        for piece, here, there in _overlaps(layout, target):
            values = saved if piece.file < 0 else self._read(layout.dtype, piece)
            values = values[there]
            problem = explain_loss(name, values, part.dtype)
            if problem:
                raise CheckpointError(f"It {problem}.")
            part[here].copy_(values)

    def fill(self, name: str, saved: Any, like: Any = None) -> Any:
        """Return a nested state with its sharded tensors read, to the CPU.

        Args:
            name: The state's path, for messages.
            saved: The state.
            like: Another one. Where it has a DTensor of a tensor's shape, the tensor is spread over
                the ranks in the same way, on the same device.
        """
        if isinstance(saved, Tensor):
            if is_dtensor(like) and like.shape == saved.shape:
                tensor = torch.empty_like(like, dtype=saved.dtype, requires_grad=False)
            elif self.holds(saved):
                tensor = torch.empty(saved.shape, dtype=saved.dtype, device="cpu")
            else:
                return saved
            self.read_into(name, tensor, saved)
            return tensor
        if isinstance(saved, Mapping):
            kin = like if isinstance(like, Mapping) else {}
            return same_mapping(saved, {k: self.fill(path_to(name, k), v, kin.get(k)) for k, v in saved.items()})
        if type(saved) in (list, tuple):
            kins = like if isinstance(like, list | tuple) else ()
            pairs = enumerate(zip_longest(saved, kins[: len(saved)]))
            return type(saved)(self.fill(path_to(name, i), v, kin) for i, (v, kin) in pairs)
        return saved

    def _read(self, dtype: torch.dtype, piece: Piece) -> Tensor:
        path = self._folder / _name_of(piece.file)
        tensor = torch.empty(piece.sizes, dtype=dtype, device="cpu")
        data = flat_bytes(tensor).numpy()
        try:
            with open_file(path) as file:
                file.seek(piece.start)
                _fill(file, data.data)
        except OSError as error:
            raise unreadable(path, error) from error
        return tensor


def _fill(file: Any, buffer: memoryview) -> None:
    while buffer:
        count = file.readinto(buffer)
        if not count:
            raise OSError("it is too short")
        buffer = buffer[count:]


def _overlaps(layout: Layout, target: Tensor) -> Iterable[tuple[Piece, tuple[slice, ...], tuple[slice, ...]]]:
    """Go through the pieces that hold something of this rank's part, and where in both."""
    for offsets, sizes in boxes_of(target):
        for piece in layout.pieces:
            here, there = [], []
            for mine, size, theirs, length in zip(offsets, sizes, piece.offsets, piece.sizes, strict=True):
                first = max(mine, theirs)
                last = min(mine + size, theirs + length)
                here.append(slice(first - mine, last - mine))
                there.append(slice(first - theirs, last - theirs))
            if all(cut.start < cut.stop for cut in here):
                yield piece, tuple(here), tuple(there)


def _sizes_in(folder: Path) -> dict[str, int]:
    """Return the sizes of the files in a folder, by name."""
    sizes = {}
    for entry in os.scandir(folder):
        with suppress(FileNotFoundError):  # it has just got its name
            sizes[entry.name] = entry.stat().st_size
    return sizes


def _name_of(rank: int) -> str:
    return f"rank-{rank}.bin"


def _failed_name_of(rank: int) -> str:
    return f"rank-{rank}.failed"


def _ranks(ranks: list[int]) -> str:
    return f"Rank {ranks[0]}" if len(ranks) == 1 else f"Ranks {ranks}"
