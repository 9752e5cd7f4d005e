"""Frames where they lie, in folders or in LMDB; and the cache of decoded ones that all ranks of a node share."""

from __future__ import annotations

import importlib.util
import io
import logging
import mmap
import os
import re
import secrets
import shutil
import tempfile
import weakref
from collections.abc import Sequence
from itertools import accumulate
from multiprocessing import reduction
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from shared.program import UserError, user_error

import ddpkit

log = logging.getLogger(__name__)
PARTS = {"H": "dataroot_gt", "L": "dataroot_lq", "S": "dataroot_spike"}  # sharp, blurred, spikes
SUBFOLDERS = {"H": ("sharp", "GT"), "L": ("blur", "input"), "S": ("spike",)}  # of a clip, as GoPro and DVD come
MAKE_IT = "run prepare.py to make the example's data, or name your own in the option file"
_PICTURES = (".png", ".jpg", ".jpeg", ".bmp")
_UNREADABLE = (OSError, ValueError, EOFError, SyntaxError)  # the last two: an empty .npy file, a broken PNG file


def open_source(root: str, part: str) -> Source:
    """Open the data of a part, "H", "L" or "S", under its root."""
    if not Path(root).is_dir():
        raise UserError(f"there is no folder {root} ({PARTS[part]}): {MAKE_IT}")
    if Path(root).suffix == ".lmdb":
        return Lmdb(root)
    return Folders(root, part)


class Folders:
    """A folder for each clip, with a file for each frame: `<root>/<clip>/<frame>.png`.

    The frames may also lie in a subfolder for their part, as in `<root>/<clip>/sharp/<frame>.png` of GoPro.
    """

    def __init__(self, root: str, part: str) -> None:
        self._root, self._part = Path(root), part
        self._suffixes = (".npy",) if part == "S" else _PICTURES

    def clips(self) -> list[str]:
        folders = [path.name for path in self._root.iterdir() if path.is_dir()]
        return sorted(name for name in folders if not name.startswith("."))

    def frames(self, clip: str) -> dict[str, str]:
        folder = self._root / clip
        for name in SUBFOLDERS[self._part]:
            if (folder / name).is_dir():
                folder = folder / name
        paths = sorted(folder.iterdir()) if folder.is_dir() else []
        paths = [path for path in paths if path.suffix.lower() in self._suffixes and not path.name.startswith(".")]
        if not paths:
            raise UserError(f"there are no {' or '.join(self._suffixes)} files in {folder}: {MAKE_IT}")
        return {path.stem: str(path) for path in paths}

    def open(self, frame: str) -> BinaryIO:
        return open(frame, "rb")


class Lmdb:
    """A data base as KAIR's and BasicSR's scripts write it: encoded pictures by `<clip>/<frame>`, and their list."""

    def __init__(self, root: str) -> None:
        if importlib.util.find_spec("lmdb") is None:
            raise UserError(f"{root}: to read it takes the package lmdb (pip install lmdb)")
        self._root = root
        with user_error(f"{root} lacks the list of its pictures, which create_lmdb.py writes", OSError):
            lines = Path(root, "meta_info.txt").read_text().splitlines()
        self._clips: dict[str, dict[str, str]] = {}
        for line in lines:  # 000/00000000.png (720,1280,3) 1
            key = line.split(" ")[0].rpartition(".")[0]
            clip, _, frame = key.rpartition("/")
            self._clips.setdefault(clip, {})[frame] = key

    def clips(self) -> list[str]:
        return sorted(self._clips)

    def frames(self, clip: str) -> dict[str, str]:
        if clip not in self._clips:
            raise UserError(f"there is no clip {clip} in {self._root}, but {', '.join(self.clips()[:5])}, …")
        return dict(sorted(self._clips[clip].items()))

    def open(self, frame: str) -> BinaryIO:
        import lmdb

        # opened for each frame: one that is open when a loading process is forked is of no use there
        with (
            user_error(f"cannot open {self._root}", lmdb.Error),
            lmdb.open(self._root, readonly=True, lock=False, readahead=False, create=False) as environment,
            environment.begin() as transaction,
        ):
            found = transaction.get(frame.encode())
        if found is None:
            raise ValueError(f"there is no {frame} in {self._root}, though meta_info.txt lists it")
        return io.BytesIO(found)


Source = Folders | Lmdb  # one part of a data set: its clips, and their frames by names without the suffix


def decode(source: Source, frame: str, part: str) -> NDArray[np.uint8]:
    """Read a frame: (height, width, 3), or the array of its spikes."""
    with user_error(f"cannot read {frame}", *_UNREADABLE), source.open(frame) as file:
        if part != "S":
            with Image.open(file) as image:
                return np.asarray(image.convert("RGB"))
        counts = np.load(file)
    if counts.dtype != np.uint8:
        raise UserError(f"{frame} holds {counts.dtype}, expected bytes (uint8)")
    return counts


def size_of(source: Source, frame: str) -> tuple[int, int]:
    """Read the height and width of a picture, which need no decoding."""
    with user_error(f"cannot read {frame}", *_UNREADABLE), source.open(frame) as file, Image.open(file) as image:
        return image.height, image.width


def sub_images(names: Sequence[str]) -> dict[str, dict[str, str]]:
    """Group frames by "", whole, and by "_s001", ..., pieces as extract_subimages.py names them; then by whole name."""
    pieces: dict[str, dict[str, str]] = {}
    for name in names:
        whole, piece = re.fullmatch(r"(.*?)(_s\d{3})?", name).groups(default="")
        pieces.setdefault(piece, {})[whole] = name
    return pieces


class Cache:
    """Decoded frames in one memory-mapped file, which all ranks of a node and their loading processes share.

    A frame is there from the time at which somebody has read it first. The file is in the folder for temporary files,
    which `TMPDIR` names; it has no name there, so that it goes with the last process, however that ends. It takes at
    most half of what is free; frames beyond that are decoded each time. Making it is collective.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = list(sizes)
        self._starts = list(accumulate(sizes, initial=len(sizes)))  # first a byte for each frame: whether it is there
        folder = Path(tempfile.gettempdir())
        path = folder / f"frames-{ddpkit.broadcast(secrets.token_hex(8))}"
        with user_error("cannot make the file of decoded frames", OSError):
            self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            ddpkit.barrier()  # all have it open
            path.unlink(missing_ok=True)
            os.ftruncate(self._file, self._starts[-1])
            self._end = shutil.disk_usage(folder).free // 2
        if self._starts[-1] > self._end and ddpkit.is_main_process():
            share = self._end / self._starts[-1]
            log.warning(
                "%s has room for %.0f %% of the decoded frames; TMPDIR names another folder", folder, 100 * share
            )
        self._map()

    def _map(self) -> None:
        self._bytes = mmap.mmap(self._file, self._starts[-1], access=mmap.ACCESS_READ)
        weakref.finalize(self, os.close, self._file)

    def __getstate__(self) -> dict[str, Any]:
        """Let loading processes that are not forked have it, too."""
        return self.__dict__ | {"_bytes": None, "_file": reduction.DupFd(self._file)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state | {"_file": state["_file"].detach()}
        self._map()

    def get(self, number: int) -> NDArray[np.uint8] | None:
        """Give a frame's bytes, without copying them, if they are there."""
        if not self._bytes[number]:
            return None
        return np.frombuffer(self._bytes, np.uint8, self._sizes[number], self._starts[number])

    def put(self, number: int, frame: NDArray[np.uint8]) -> None:
        """Keep a frame, if there is room; by writing, since a full disk would kill who stores into the map."""
        if self._starts[number + 1] > self._end:
            return
        try:
            if os.pwrite(self._file, frame.tobytes(), self._starts[number]) == frame.size:
                os.pwrite(self._file, b"\1", number)
        except OSError as error:
            self._end = 0
            log.warning("decoded frames are no longer kept: %s", error)
