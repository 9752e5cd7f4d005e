"""Read frames from folders or LMDB; cache decoded frames for all ranks of a node."""

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
from shared.program import UserError, by_number, user_error

import ddpkit
from deblurring.clips import ROOT

log = logging.getLogger(__name__)
PARTS = {"H": "dataroot_gt", "L": "dataroot_lq", "S": "dataroot_spike"}  # sharp, blurred, spikes
SUBFOLDERS = {"H": ("sharp", "GT"), "L": ("blur", "input"), "S": ("spike",)}  # of a clip, as GoPro and DVD come
_PICTURES = (".png", ".jpg", ".jpeg", ".bmp")
_UNREADABLE = (OSError, ValueError, EOFError, SyntaxError)  # the last two: an empty .npy file, a broken PNG file


def remedy(path: str | Path) -> str:
    """Say what to do if there are no frames; `prepare.py` makes the example's."""
    if ROOT in Path(path).parents:
        return "run prepare.py to make the example's data, or name your own in the option file"
    return "name a folder that holds a folder of frames for each clip"


def open_source(root: str, part: str) -> Source:
    """Open the data of a part, "H", "L" or "S", under its root."""
    if not Path(root).is_dir():
        raise UserError(f"there is no folder {root} ({PARTS[part]}): {remedy(root)}")
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
        paths = _visible(self._root)
        clips = [path.name for path in paths if path.is_dir()]
        frames = [path for path in paths if path.suffix.lower() in self._suffixes]
        if frames and not clips:
            raise UserError(f"{self._root} itself holds {len(frames)} frames: name its parent, which holds the clips")
        return clips

    def frames(self, clip: str) -> dict[str, str]:
        folder = self._root / clip
        for name in SUBFOLDERS[self._part]:
            if (folder / name).is_dir():
                folder = folder / name
        paths = _visible(folder) if folder.is_dir() else []
        files = [path for path in paths if path.suffix.lower() in self._suffixes]
        frames = {path.stem: str(path) for path in files}
        if not frames:
            raise UserError(f"there are no {' or '.join(self._suffixes)} files in {folder}: {remedy(folder)}")
        kinds = {_kind(name) for name in frames}
        lost = [path.name for path in paths if path.stem not in frames and _kind(path.stem) in kinds]
        lost += [path.name for path in files if frames[path.stem] != str(path)]
        if lost:
            raise UserError(
                f"{folder} holds {len(frames)} frames and {len(lost)} more that would be ignored, "
                f"{', '.join(lost[:5])}: each frame must be one file, {' or '.join(self._suffixes)}"
            )
        return frames

    def open(self, frame: str) -> BinaryIO:
        return open(frame, "rb")


def _visible(folder: Path) -> list[Path]:
    """List a folder without hidden files, in the order of the numbers."""
    paths = [path for path in folder.iterdir() if not path.name.startswith(".")]
    return sorted(paths, key=lambda path: by_number(path.name))


def _kind(name: str) -> str:
    """Replace the numbers in a name, so that all frames have one kind and Thumbs.db another."""
    return re.sub(r"\d+", "0", name)


class Lmdb:
    """A database from KAIR's or BasicSR's scripts: encoded pictures by `<clip>/<frame>`, and their list."""

    def __init__(self, root: str) -> None:
        if importlib.util.find_spec("lmdb") is None:
            raise UserError(f"{root} needs the package lmdb (pip install lmdb)")
        self._root = root
        with user_error(f"{root} lacks the list of its pictures, which create_lmdb.py writes", OSError):
            lines = Path(root, "meta_info.txt").read_text().splitlines()
        self._clips: dict[str, dict[str, str]] = {}
        for line in lines:  # 000/00000000.png (720,1280,3) 1
            key = line.split(" ")[0].rpartition(".")[0]
            clip, _, frame = key.rpartition("/")
            self._clips.setdefault(clip, {})[frame] = key

    def clips(self) -> list[str]:
        return sorted(self._clips, key=by_number)

    def frames(self, clip: str) -> dict[str, str]:
        if clip not in self._clips:
            raise UserError(f"there is no clip {clip} in {self._root}, but {', '.join(self.clips()[:5])}, …")
        return {name: self._clips[clip][name] for name in sorted(self._clips[clip], key=by_number)}

    def open(self, frame: str) -> BinaryIO:
        import lmdb

        # opened for each frame: an environment opened before a fork cannot be used after it
        with (
            user_error(f"cannot open {self._root}", lmdb.Error),
            lmdb.open(self._root, readonly=True, lock=False, readahead=False, create=False) as environment,
            environment.begin() as transaction,
        ):
            found = transaction.get(frame.encode())
        if found is None:
            raise ValueError(f"there is no {frame} in {self._root}, though meta_info.txt lists it")
        return io.BytesIO(found)


Source = Folders | Lmdb  # one part of a data set: its clips and their frames, named without suffix


def decode(source: Source, frame: str, part: str) -> NDArray[np.uint8]:
    """Read a frame, (height, width, 3), or its spikes."""
    with user_error(f"cannot read {frame}", *_UNREADABLE), source.open(frame) as file:
        if part != "S":
            with _open_picture(file, frame) as image:
                return np.asarray(image.convert("RGB"))
        counts = np.load(file)
    if counts.dtype != np.uint8:
        raise UserError(f"{frame} holds {counts.dtype}, expected bytes (uint8)")
    return counts


def shape_of(source: Source, frame: str, part: str, whole: bool = False) -> tuple[int, ...]:
    """Return the shape of `decode()` without decoding; with `whole`, check that the file is complete."""
    if part == "S":
        return decode(source, frame, part).shape
    with user_error(f"cannot read {frame}", *_UNREADABLE), source.open(frame) as file:
        with _open_picture(file, frame) as image:
            shape = (image.height, image.width, 3)
            if whole and image.format == "PNG":
                image.verify()  # by checksums, in a tenth of the time
            elif whole:
                image.draft("RGB", (1, 1))  # JPEG: at an eighth of the size
                image.load()
    return shape


def _open_picture(file: BinaryIO, frame: str) -> Image.Image:
    image = Image.open(file)
    if image.mode[0] in "IF":  # which Pillow would clip to white
        raise UserError(f"{frame} has pixels of more than 8 bits (Pillow's mode {image.mode}): convert it to 8 bits")
    return image


def sub_images(names: Sequence[str]) -> dict[str, dict[str, str]]:
    """Group frames by "" or a piece such as "_s001" (of extract_subimages.py), then by the whole frame's name."""
    pieces: dict[str, dict[str, str]] = {}
    for name in names:
        whole, piece = re.fullmatch(r"(.*?)(_s\d{3})?", name).groups(default="")
        pieces.setdefault(piece, {})[whole] = name
    return pieces


class Cache:
    """Decoded frames in one memory-mapped file, which all ranks of a node and their loading processes share.

    The first process that reads a frame stores it. The file is in `TMPDIR`; it is unlinked at once, so that it goes
    with the last process. It takes at most half of the free space; other frames are decoded each time. Making it is
    collective.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = list(sizes)
        self._starts = list(accumulate(sizes, initial=len(sizes)))  # first a byte for each frame: whether it is stored
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
                "%s has room for %.0f %% of the decoded frames; set TMPDIR to use another folder", folder, 100 * share
            )
        self._map()

    def _map(self) -> None:
        self._bytes = mmap.mmap(self._file, self._starts[-1], access=mmap.ACCESS_READ)
        weakref.finalize(self, os.close, self._file)

    def __getstate__(self) -> dict[str, Any]:
        """Make the cache available to loading processes that are not forked."""
        return self.__dict__ | {"_bytes": None, "_file": reduction.DupFd(self._file)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state | {"_file": state["_file"].detach()}
        self._map()

    def get(self, number: int) -> NDArray[np.uint8] | None:
        """Return a frame's bytes without copying them, or None if they are not stored."""
        if not self._bytes[number]:
            return None
        return np.frombuffer(self._bytes, np.uint8, self._sizes[number], self._starts[number])

    def put(self, number: int, frame: NDArray[np.uint8]) -> None:
        """Store a frame, if there is room, with `pwrite`: on a full disk, a write to the map would kill the process."""
        if self._starts[number + 1] > self._end:
            return
        try:
            if os.pwrite(self._file, frame.tobytes(), self._starts[number]) == frame.size:
                os.pwrite(self._file, b"\1", number)
        except OSError as error:
            self._end = 0
            log.warning("decoded frames are no longer kept: %s", error)
