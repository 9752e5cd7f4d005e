"""Sharded tensors in checkpoints: each rank writes its part, and reads what it needs.

A DTensor (`fully_shard`, tensor parallelism) is cut into pieces, boxes of its elements. One of the ranks that hold a
piece writes it into its own file, in a folder beside the checkpoint. A file holds the bytes of its pieces, one after
the other, and a last line with their checksum.

In the checkpoint's own file an empty tensor on the meta device takes the place of each.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..collectives.differences import differing_parts, list_lines, name_ranks
from ..collectives.tree import flat_bytes, local_part, name_dtype
from ..errors import CheckpointError
from ..launch.ranks import get_rank, get_world_size
from ..parallel.models import unwrap_model
from ..torch_internals import is_dtensor
from .files import Check, SummedFile, open_file, reading, verify, write_durably, writing_into
from .folder import is_folder_of
from .states import ByName, explain_loss, map_leaves, tensors_in, tensors_of

_ALIGNMENT = 64  # bytes: each piece starts at a multiple of it
_PAUSE = 0.02  # seconds between checks for the other ranks' files
_PATIENCE = 300.0  # seconds without growth of a file before giving up
_PATIENCE_AT_END = 10.0  # the same while this process exits: a rank may have been killed

Box = tuple[tuple[int, ...], tuple[int, ...]]  # first index of a piece in each dimension, and its size
Slices = tuple[slice, ...]
Parts = Sequence[tuple[int, Tensor]]  # pieces that a rank writes: first byte in its file, and values

# A whole sharded tensor as the checkpoint's file describes it: its dtype, shape and pieces. A piece has its first index
# in each dimension, its size in each, the rank that wrote it, and its first byte in that rank's file.
Layout = dict[str, Any]


class WrittenPieces:
    """The sharded tensors of a checkpoint being saved, if there are any.

    Args:
        path: The checkpoint.
        tensors: This rank's tensors, by path.
        described: `describe_parts()` of each rank.

    Attributes:
        tensors: This rank's tensors, by path.
        rank: This rank.
        entry: Their description in the checkpoint's file; {} if there are none.
        folder: Folder of all ranks' files.
        mine: The pieces that this rank writes.

    Raises:
        CheckpointError: On every rank, if ranks hold different tensors, or pieces of one are missing.
    """

    def __init__(self, path: Path, tensors: ByName, described: list[dict[str, Any]]) -> None:
        layouts = lay_out([each["tensors"] for each in described])
        self.tensors = tensors
        self.rank = get_rank()  # the job may have ended when the pieces are written
        self._writers = _files_of(layouts)
        self.folder = path.with_name(f"{path.stem}.{described[0]['token']}")  # unique to this checkpoint
        self.entry = {"folder": self.folder.name, "tensors": layouts} if layouts else {}
        self.mine = []
        for name, layout in layouts.items():
            starts = [start for _, _, rank, start in layout["pieces"] if rank == self.rank]
            self.mine += [(start, local_part(tensors[name]).detach()) for start in starts]

    def wait_for_others(self, check: Check) -> None:
        """Wait until the files of all ranks are on the disk; for a shorter time while this process exits.

        Args:
            check: Raises if nobody waits for the checkpoint any more.

        Raises:
            CheckpointError: If a rank could not write its file, or writes nothing for too long.
        """
        sizes: dict[str, int] = {}
        since = time.monotonic()
        while True:
            check()
            now = _sizes_in(self.folder)
            missing = [rank for rank in self._writers if _name_of(rank) not in now]
            if not missing:
                return
            if now != sizes:
                sizes = now
                since = time.monotonic()
            patience = _PATIENCE if threading.main_thread().is_alive() else _PATIENCE_AT_END
            problem = ""
            failed = [rank for rank in missing if _failed_name_of(rank) in now]
            if failed:
                problem = f"{name_ranks(failed)} could not write into {self.folder}"
            elif time.monotonic() - since > patience:
                problem = f"{name_ranks(missing)} wrote nothing into {self.folder} for {patience:g} s"
            if problem:
                raise CheckpointError(f"Not saved: {problem}. Earlier checkpoints are complete.")
            time.sleep(_PAUSE)


def describe_parts(tensors: ByName) -> dict[str, Any]:
    """Describe this rank's parts of sharded tensors, in plain data for the other ranks."""
    found = {}
    for name, tensor in tensors.items():
        found[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "boxes": boxes_of(tensor)}
    return {"token": os.urandom(8).hex(), "tensors": found}


def boxes_of(tensor: Any) -> list[Box]:
    """Return this rank's part of a tensor, as boxes of the whole; at most one.

    (It uses DTensor's interface for `torch.distributed.checkpoint`, the same from torch 2.6 to 2.15.)

    Raises:
        CheckpointError: If it is not a box, or the ranks hold partial sums.
    """
    if not is_dtensor(tensor):
        return [((0,) * tensor.dim(), tuple(tensor.shape))]
    if any(placement.is_partial() for placement in tensor.placements):
        raise CheckpointError(
            f"The ranks hold partial sums, a DTensor of {tensor.placements}, not parts of a tensor: "
            "pass tensor.redistribute(placements=...) or tensor.full_tensor()."
        )
    if tensor.device_mesh.get_coordinate() is None or local_part(tensor).numel() == 0:
        return []
    boxes = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in tensor.__create_chunk_list__()]
    if [sizes for _, sizes in boxes] != [local_part(tensor).shape]:
        raise CheckpointError(f"This rank's part of a DTensor of {tensor.placements} is not one contiguous piece.")
    return boxes


def lay_out(by_rank: list[dict[str, dict[str, Any]]]) -> dict[str, Layout]:
    """Assign the pieces: each is written once, by the rank with the least to write so far.

    Args:
        by_rank: `describe_parts()` of the tensors on each rank.

    Raises:
        CheckpointError: If ranks have different tensors, or pieces of one are missing.
    """
    _check_alike(by_rank)
    sizes = [0] * len(by_rank)  # of the ranks' files, in bytes
    layouts = {}
    for name, first in by_rank[0].items():
        holders: dict[Box, list[int]] = {}
        for rank, tensors in enumerate(by_rank):
            for box in tensors[name]["boxes"]:
                holders.setdefault(box, []).append(rank)
        pieces = []
        for (offsets, lengths), ranks in holders.items():
            rank = min(ranks, key=sizes.__getitem__)
            pieces.append([list(offsets), list(lengths), rank, sizes[rank]])
            sizes[rank] += -(-math.prod(lengths) * first["dtype"].itemsize // _ALIGNMENT) * _ALIGNMENT
        layouts[name] = {"dtype": first["dtype"], "shape": first["shape"], "pieces": pieces}
        _check_pieces(name, layouts[name])
    return layouts


def _files_of(layouts: Mapping[str, Layout]) -> list[int]:
    """Return the ranks that write a file, in increasing order."""
    return sorted({rank for layout in layouts.values() for _, _, rank, _ in layout["pieces"]})


def _check_alike(by_rank: list[dict[str, dict[str, Any]]]) -> None:
    """Raise unless all ranks hold parts of the same tensors."""
    texts = {}
    for rank, tensors in enumerate(by_rank):
        texts[rank] = {name: f"{name_dtype(entry['dtype'])}{entry['shape']}" for name, entry in tensors.items()}
    differing = differing_parts(texts)
    if differing:
        lines = [f"{name}: {found}" for name, found in differing.items()]
        headline = "Nothing was saved: the ranks hold parts of different tensors:"
        raise CheckpointError(list_lines(headline, lines))


def _check_pieces(name: str, layout: Layout) -> None:
    """Raise unless the pieces of a tensor have as many dimensions and elements."""
    shape = layout["shape"]
    elements = 0
    for offsets, sizes, _, _ in layout["pieces"]:
        if not len(offsets) == len(sizes) == len(shape):
            problem = f"{name} has {len(shape)} dimensions"
            raise CheckpointError(f"{problem}, but its pieces have another number.")
        elements += math.prod(sizes)
    if elements != math.prod(shape):
        problem = f"{name} has {math.prod(shape)} elements"
        raise CheckpointError(f"{problem}, but its pieces on all ranks have {elements}.")


def write_pieces(folder: Path, rank: int, pieces: Parts, check: Check | None = None) -> None:
    """Write a rank's file; it gets its name once it is on the disk.

    Args:
        folder: The folder of the pieces.
        rank: The rank.
        pieces: First byte and values of each piece, in their order in the file.
        check: Called before each write, and may raise.

    Raises:
        CheckpointError: If writing fails.
    """

    def write(file: BinaryIO) -> None:
        summed = SummedFile(file, check)
        position = 0
        for start, values in pieces:
            data = flat_bytes(values).cpu().numpy()
            summed.write(bytes(start - position))  # padding
            summed.write(data.data)
            position = start + data.nbytes
        summed.end()

    path = folder / _name_of(rank)
    if folder.is_symlink():
        raise CheckpointError(f"Cannot write {path}: {folder} is a link, which no Checkpointer creates.")
    try:
        with writing_into(path):
            write_durably(path, write)
    except BaseException:
        with suppress(OSError):
            open_file(folder / _failed_name_of(rank), "xb").close()  # rank 0 waits for one of the two
        raise


class SavedPieces:
    """The sharded tensors of a checkpoint being loaded, read on demand.

    Args:
        path: The checkpoint.
        content: Its content, with a placeholder for each sharded tensor; there may be none.
        is_sharded: Whether the objects to restore hold sharded tensors.

    Raises:
        CheckpointError: If the file does not locate the pieces, or a file of this rank's share is
            missing or damaged.
    """

    def __init__(self, path: Path, content: ByName, is_sharded: bool) -> None:
        entry = content.get("sharded", {"folder": path.name, "tensors": {}})
        layouts = entry["tensors"]
        if "sharded" in content and not is_folder_of(path, entry["folder"]):
            raise CheckpointError(
                f"Cannot read {path}: its folder of pieces does not have a name that a Checkpointer "
                "gives. Was the file renamed?"
            )
        for name, layout in layouts.items():
            _check_pieces(name, layout)
        self._folder = path.with_name(entry["folder"])
        if self._folder.is_symlink():
            raise CheckpointError(f"Cannot read {path}: {self._folder} is a link, which no Checkpointer creates.")
        self._is_used = is_sharded or bool(layouts)
        self._layouts: dict[Tensor, Layout] = {}  # by their placeholders
        for name, tensor in tensors_in(content["state"]):
            if tensor.is_meta and name in layouts:
                self._layouts[tensor] = layouts[name]
        for rank in _files_of(layouts)[get_rank() :: get_world_size()]:
            path = self._folder / _name_of(rank)
            with reading(path) as file:
                verify(file)

    def explain_loss(self, key: str, here: Tensor, saved: Tensor) -> str:
        """Explain that a model's tensor has a dtype that cannot hold the saved values of its part; "" if it can."""
        if not self._holds(saved):
            return explain_loss(key, saved, here.dtype)
        if here.dtype == saved.dtype:
            return ""  # without reading it
        for _, values in self._parts(here, saved):
            if problem := explain_loss(key, values, here.dtype):
                return problem
        return ""

    def spread(self, target: Any, state: Any) -> Any:
        """Return a state with its tensors read, each sharded like the object's.

        Args:
            target: The object.
            state: The state from `state_for()`.
        """
        if not self._is_used:
            return state
        if isinstance(target, nn.Module):
            for key, here in unwrap_model(target).state_dict().items():
                saved = state[key]
                are_tensors = isinstance(here, Tensor) and isinstance(saved, Tensor)
                if are_tensors and (is_dtensor(here) or self._holds(saved)):
                    # in place, so that no copy is needed; it is then loaded from itself
                    self._read_into(here, saved)
                    state[key] = here
            return state
        if isinstance(target, Optimizer):
            return self._for_optimizer(target, state)
        return self.fill(state, target.state_dict())

    @torch.no_grad()
    def fill(self, state: Any, template: Any = None) -> Any:
        """Return a nested state with its sharded tensors read, on the CPU.

        Args:
            state: The state.
            template: Another state. Where it has a DTensor of a tensor's shape, the tensor is sharded in
                the same way, on the same device.
        """
        templates = dict(tensors_of("", template))

        def read(path: str, saved: Any) -> Any:
            like: Any = templates.get(path)
            if isinstance(saved, Tensor) and is_dtensor(like) and like.shape == saved.shape:
                tensor = torch.empty_like(like, dtype=saved.dtype, requires_grad=False)
            elif self._holds(saved):
                tensor = torch.empty(saved.shape, dtype=saved.dtype, device="cpu")
            else:
                return saved
            self._read_into(tensor, saved)
            return tensor

        return map_leaves("", state, read)

    def _for_optimizer(self, optimizer: Optimizer, saved: Any) -> Any:
        """Return a saved state with each parameter's tensors sharded like the parameter."""
        parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
        keys = chain.from_iterable(group["params"] for group in saved["param_groups"])
        states = dict(saved["state"])
        for key, parameter in zip(keys, parameters, strict=True):
            if key in states:
                template = {kind: parameter for kind in states[key] if kind != "step"}
                states[key] = self.fill(states[key], template)
        return {**saved, "state": states}

    def _holds(self, saved: Any) -> bool:
        """Return whether a value of the states stands for a tensor in the files."""
        return isinstance(saved, Tensor) and saved in self._layouts

    @torch.no_grad()
    def _read_into(self, target: Tensor, saved: Tensor) -> None:
        """Overwrite this rank's part of a tensor, or all of a plain one, with a saved one of its shape."""
        part = local_part(target).detach()
        for place, values in self._parts(target, saved):
            part[place].copy_(values)

    def _parts(self, target: Tensor, saved: Tensor) -> Iterator[tuple[Slices, Tensor]]:
        """Iterate over the saved values for this rank's part of a tensor: the places in it, and the values."""
        for box in boxes_of(target):
            if not self._holds(saved):
                _, there = _overlap(box, [0] * saved.dim(), saved.shape)
                yield (), saved[there]
                continue
            layout = self._layouts[saved]
            for offsets, sizes, rank, start in layout["pieces"]:
                here, there = _overlap(box, offsets, sizes)
                if all(cut.start < cut.stop for cut in here):
                    piece = torch.empty(sizes, dtype=layout["dtype"], device="cpu")
                    self._read(piece, rank, start)
                    yield here, piece[there]

    def _read(self, piece: Tensor, rank: int, start: int) -> None:
        """Read a piece from a rank's file."""
        path = self._folder / _name_of(rank)
        data = flat_bytes(piece).numpy()
        with reading(path) as file:
            file.seek(start)
            if file.readinto(data.data) < len(data):
                raise OSError("it is too short")


def _overlap(box: Box, offsets: Sequence[int], sizes: Sequence[int]) -> tuple[Slices, Slices]:
    """Return the slices in which a box and a piece overlap, in each of them; empty ones if they do not."""
    here, there = [], []
    for mine, length, theirs, size in zip(*box, offsets, sizes, strict=True):
        first = max(mine, theirs)
        last = min(mine + length, theirs + size)
        here.append(slice(first - mine, last - mine))
        there.append(slice(first - theirs, last - theirs))
    return tuple(here), tuple(there)


def _sizes_in(folder: Path) -> dict[str, int]:
    """Return the sizes of the files in a folder, by name."""
    sizes = {}
    for entry in os.scandir(folder):
        with suppress(FileNotFoundError):  # it has just been renamed
            sizes[entry.name] = entry.stat().st_size
    return sizes


def _name_of(rank: int) -> str:
    return f"rank-{rank}.bin"


def _failed_name_of(rank: int) -> str:
    return f"rank-{rank}.failed"
