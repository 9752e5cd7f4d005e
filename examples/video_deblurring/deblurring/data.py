"""Clips in the layout of the GoPro data set, and crops of them to train on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from shared.program import UserError, user_error

import ddpkit
from deblurring.clips import WINDOW

PARTS = {"H": "dataroot_gt", "L": "dataroot_lq", "S": "dataroot_spike"}  # sharp, blurred, spikes
_MAKE_IT = "run prepare.py to make the example's data, or name your own in the option file"


class Clip:
    """The frames of one clip: sharp ("H"), blurred ("L"), and spike counts ("S") where the options name some.

    A frame is an array of bytes, (height, width, 3), for spikes (WINDOW, height / 2, width / 2).

    Args:
        name: The clip's folder in each root.
        files: The frames' files by part, equally many.
        cached: Whether to keep the frames in memory, or to read them each time.
    """

    def __init__(self, name: str, files: dict[str, list[Path]], cached: bool) -> None:
        self.name, self._files = name, files
        self.parts = tuple(files)
        self.height, self.width, _ = _read(files["H"][0]).shape
        if self.height % 2 or self.width % 2:
            raise UserError(f"clip {name} has frames of {self.width} x {self.height}: width and height must be even")
        self._shapes = {"H": (self.height, self.width, 3), "S": (WINDOW, self.height // 2, self.width // 2)}
        self._shapes["L"] = self._shapes["H"]
        numbers = range(len(self) if cached else 1)  # the first frames are looked at in any case
        frames = {part: [self._load(part, number) for number in numbers] for part in files}
        self._frames = frames if cached else None

    def __len__(self) -> int:
        return len(self._files["H"])

    def frame(self, part: str, number: int) -> NDArray[np.uint8]:
        return self._frames[part][number] if self._frames else self._load(part, number)

    def _load(self, part: str, number: int) -> NDArray[np.uint8]:
        frame = _read(path := self._files[part][number])
        if frame.shape != self._shapes[part]:
            raise UserError(f"{path} holds {frame.shape}, but {self._shapes[part]} fits the sharp frames")
        return frame

    def stack(self, part: str) -> NDArray[np.uint8]:
        """All frames of a part with the channels first: (n, channels, height, width)."""
        frames = np.stack([self.frame(part, number) for number in range(len(self))])
        return frames if part == "S" else np.ascontiguousarray(frames.transpose(0, 3, 1, 2))


def find_clips(data: dict[str, Any], num_frame: int) -> list[Clip]:
    """The clips that a `datasets` section of the options names.

    Args:
        data: The section.
        num_frame: Frames that a clip must have.

    Raises:
        UserError: If a folder, clip or frame is missing or does not fit; the message says which.
    """
    roots = {part: Path(data[key]) for part, key in PARTS.items() if data[key]}
    for part, root in roots.items():
        if not root.is_dir():
            raise UserError(f"there is no folder {root} ({PARTS[part]}): {_MAKE_IT}")
    names = _listed_names(data["meta_info_file"]) if data["meta_info_file"] else dict.fromkeys(_names(roots["H"]))
    if not names:
        raise UserError(f"there are no clips in {data['meta_info_file'] or roots['H']}: {_MAKE_IT}")
    clips = []
    for name, count in names.items():
        files = {part: _frames(root / name, part) for part, root in roots.items()}
        stems = {part: [path.stem for path in paths] for part, paths in files.items()}
        for part, root in roots.items():
            if odd := sorted(set(stems[part]) ^ set(stems["H"])):
                raise UserError(
                    f"the frames in {root / name} and {roots['H'] / name} must have the same names, but {odd[0]} is "
                    "in one of them only"
                )
        if count not in (None, len(stems["H"])):
            raise UserError(f"{roots['H'] / name} has {len(stems['H'])} frames, but meta_info_file says {count}")
        if len(stems["H"]) < num_frame:
            raise UserError(f"{roots['H'] / name} has {len(stems['H'])} frames, but num_frame is {num_frame}")
        clips.append(Clip(name, files, data["cache_data"]))
    return clips


class Crops:
    """Random crops of `num_frame` consecutive frames, augmented; the samples of an epoch cover the frames about once.

    What a sample is depends on (seed, epoch, index) alone, so any number of ranks and workers draws the same.

    Args:
        clips: Of which crops are taken.
        data: The `datasets.train` section of the options.
        seed: The run's.

    A sample holds, by part, bytes of shape (num_frame, channels, height, width): "H" and "L" of `gt_size` pixels a
    side, "S" of half of it.
    """

    def __init__(self, clips: list[Clip], data: dict[str, Any], seed: int) -> None:
        self.clips, self.seed, self.epoch = clips, seed, 0
        self.frames, self.size = data["num_frame"], data["gt_size"]
        self.flip, self.rotate = data["use_hflip"], data["use_rot"]
        self.places: list[tuple[Clip, int]] = []  # a clip and a first frame
        for clip in clips:
            if min(clip.height, clip.width) < self.size:
                raise UserError(
                    f"clip {clip.name} has frames of {clip.width} x {clip.height}, smaller than gt_size {self.size}"
                )
            crops = max(1, round(clip.height * clip.width / self.size**2))
            self.places += [(clip, first) for first in range(len(clip) - self.frames + 1) for _ in range(crops)]

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> dict[str, NDArray[np.uint8]]:
        clip, first = self.places[index]
        rng = np.random.default_rng(ddpkit.sample_seed(self.seed, self.epoch, index))
        top = 2 * int(rng.integers((clip.height - self.size) // 2 + 1))  # even: spikes have half the resolution
        left = 2 * int(rng.integers((clip.width - self.size) // 2 + 1))
        flip, mirror, turn = rng.integers(2, size=3).astype(bool) & (self.flip, self.rotate, self.rotate)
        sample = {}
        for part in clip.parts:
            scale = 2 if part == "S" else 1
            y, x, size = top // scale, left // scale, self.size // scale
            crop = np.stack([_cut(clip.frame(part, first + i), part, y, x, size) for i in range(self.frames)])
            crop = crop[..., ::-1] if flip else crop
            crop = crop[..., ::-1, :] if mirror else crop
            sample[part] = np.ascontiguousarray(crop.swapaxes(-1, -2) if turn else crop)
        return sample


def _cut(frame: NDArray[np.uint8], part: str, y: int, x: int, size: int) -> NDArray[np.uint8]:
    """A square of a frame, channels first."""
    if part == "S":
        return frame[:, y : y + size, x : x + size]
    return frame[y : y + size, x : x + size].transpose(2, 0, 1)


def _names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))


@user_error("cannot read meta_info_file", OSError, ValueError)
def _listed_names(file: str) -> dict[str, int | None]:
    """Clips and, where it is said, how many frames they have; as in the original's lists: "000 100 (720,1280,3) 0"."""
    lines = [line.split() for line in Path(file).read_text().splitlines() if line.strip()]
    return {name: int(rest[0]) if rest else None for name, *rest in lines}


def _frames(folder: Path, part: str) -> list[Path]:
    suffix = ".npy" if part == "S" else ".png"
    if not folder.is_dir() or not (paths := sorted(folder.glob(f"*{suffix}"))):
        raise UserError(f"there are no {suffix} files in {folder}: {_MAKE_IT}")
    return paths


def _read(path: Path) -> NDArray[np.uint8]:
    broken = (OSError, ValueError, EOFError, SyntaxError)  # the last two: an empty .npy file, a broken PNG file
    with user_error(f"cannot read {path}", *broken):
        if path.suffix == ".npy":
            frame = np.load(path)
        else:
            with Image.open(path) as image:
                frame = np.asarray(image.convert("RGB"))
    if frame.dtype != np.uint8:
        raise UserError(f"{path} holds {frame.dtype}, expected bytes (uint8)")
    return frame
