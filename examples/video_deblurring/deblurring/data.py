"""Clips of sharp and blurred frames, and random crops for training."""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from shared.program import UserError, user_error

import ddpkit
from deblurring.clips import WINDOW
from deblurring.frames import PARTS, Cache, Source, decode, open_source, remedy, shape_of, sub_images

log = logging.getLogger(__name__)
HELD_OUT = {  # of REDS, by val_partition
    "REDS4": {"000", "011", "015", "020"},
    "official": {f"{number:03d}" for number in range(240, 270)},
}


class Clip:
    """The frames of one clip: blurred ("L") and, if the options name them, sharp ("H") and spike counts ("S").

    A frame is an array of bytes, (height, width, 3), for spikes (WINDOW, height / 2, width / 2). The sharp frames are
    `scale` times as high and wide as the blurred ones. Sources read the files; each part has as many.
    """

    def __init__(
        self, name: str, names: list[str], files: dict[str, list[str]], sources: dict[str, Source], scale: int
    ) -> None:
        self.name, self.names, self.parts = name, names, tuple(files)
        self._files, self._sources = files, sources
        self.cache: Cache | None = None
        self.slots: dict[str, int] = {}  # of each part's first frame in the cache
        first = self.parts[0]
        factor = 1 if first == "H" else scale
        at_first = shape_of(sources[first], files[first][0], first)
        height, width = self.height, self.width = [factor * size for size in at_first[:2]]
        self.check_multiple(math.lcm(scale, 2 if "S" in files else 1), "with spikes or a scale")
        self.shapes = {
            "H": (height, width, 3),
            "L": (height // scale, width // scale, 3),
            "S": (WINDOW, height // 2, width // 2),
        }
        for part in files:
            self.check_file(part, 0)

    def __len__(self) -> int:
        return len(self.names)

    def check_multiple(self, factor: int, where: str) -> None:
        """Raise if the sharp frames' height or width is not a multiple of a number."""
        if self.height % factor or self.width % factor:
            raise UserError(
                f"clip {self.name} has frames of {self.width} x {self.height}: {where}, width and height must be "
                f"multiples of {factor}: crop or pad the frames"
            )

    def check_file(self, part: str, number: int, whole: bool = False) -> None:
        """Raise if a frame does not fit the clip's first one or, with `whole`, if its file is not complete."""
        where = self._files[part][number]
        self._check(where, shape_of(self._sources[part], where, part, whole), part)

    def frame(self, part: str, number: int) -> NDArray[np.uint8]:
        """Read a frame, from the cache if it is there."""
        if self.cache is None:
            return self._load(part, number)
        slot = self.slots[part] + number
        kept = self.cache.get(slot)
        if kept is not None:
            return kept.reshape(self.shapes[part])
        frame = self._load(part, number)
        self.cache.put(slot, frame)
        return frame

    def _load(self, part: str, number: int) -> NDArray[np.uint8]:
        where = self._files[part][number]
        frame = decode(self._sources[part], where, part)
        self._check(where, frame.shape, part)
        return frame

    def _check(self, where: str, shape: tuple[int, ...], part: str) -> None:
        if shape != self.shapes[part]:
            raise UserError(f"{where} holds {shape}, but must hold {self.shapes[part]} to fit the clip's first frame")

    def stack(self, part: str) -> NDArray[np.uint8]:
        """Read all frames of a part, with the channels first: (n, channels, height, width)."""
        frames = np.stack([self.frame(part, number) for number in range(len(self))])
        return frames if part == "S" else np.ascontiguousarray(frames.transpose(0, 3, 1, 2))


def find_clips(data: dict[str, Any], least: int, scale: int = 1) -> list[Clip]:
    """Find the clips of a `datasets` section, each of at least `least` frames. Collective."""
    sources = {part: open_source(data[key], part) for part, key in PARTS.items() if data[key]}
    listed = data["meta_info_file"]
    first = next(iter(sources))  # the sharp frames or, without them, the blurred ones
    names = _listed_names(listed) if listed else dict.fromkeys(sources[first].clips(), ())
    clips = []
    for name, wanted in names.items():
        if name not in HELD_OUT.get(data.get("val_partition"), ()):
            clips += _find_pieces(name, wanted, data, sources, scale)
    if not clips:
        place = listed or data[PARTS[first]]
        raise UserError(f"there are no clips, each a folder, in {place}: {remedy(place)}")
    for clip in clips:
        if len(clip) < least:
            place = Path(data[PARTS[first]], clip.name)
            raise UserError(f"{place} has {len(clip)} frames, but at least {least} are needed")
    _warn_of_gaps(clips)
    if data["cache_data"]:
        _keep_all(clips)
    return clips


def _warn_of_gaps(clips: list[Clip]) -> None:
    """Warn of clips whose frames are not numbered in equal steps: frames seem to be missing."""
    gaps = []
    for clip in clips:
        numbers = [number for name in clip.names for number in re.findall(r"\d+", name)[-1:]]
        steps = np.diff(np.array(numbers, float))
        if len(set(steps)) > 1:
            gaps.append(f"{clip.name} after {clip.names[int(steps.argmax())]}")
    if gaps and ddpkit.is_main_process():
        log.warning("frames seem to be missing in %d of %d clips: %s", len(gaps), len(clips), ", ".join(gaps[:5]))


def _find_pieces(
    name: str, wanted: Sequence[int], data: dict[str, Any], sources: dict[str, Source], scale: int
) -> list[Clip]:
    """Find a clip, or one for each piece that its frames were cut into."""
    files = {part: source.frames(name) for part, source in sources.items()}
    here, *others = (f"{data[PARTS[part]]}/{name}" for part in files)
    named, *rest = files.values()
    for other, frames in zip(others, rest, strict=True):
        odd = sorted(frames.keys() ^ named.keys())
        if odd:
            raise UserError(
                f"the frames in {other} and {here} must have the same names, but {odd[0]} is in one of them only"
            )
        if other == here and frames == named:
            raise UserError(f"{here} would be the sharp and the blurred frames: name two folders, or the clips' parent")
    clips = []
    for piece, frames in sub_images(named).items():
        chosen = frames
        if len(wanted) == 2:  # a number of frames and the first one
            count, first = wanted
            chosen = {
                whole: frames[whole] for whole in frames if not whole.isdigit() or 0 <= int(whole) - first < count
            }
        if wanted and len(chosen) != wanted[0]:
            raise UserError(f"{here} has {len(chosen)} frames, but meta_info_file says {wanted[0]}")
        places = {part: [found[frame] for frame in chosen.values()] for part, found in files.items()}
        clips.append(Clip(name + piece, list(chosen), places, sources, scale))
    return clips


def _keep_all(clips: list[Clip]) -> None:
    """Give all clips one shared cache. Collective."""
    sizes: list[int] = []
    for clip in clips:
        for part in clip.parts:
            clip.slots[part] = len(sizes)
            sizes += [math.prod(clip.shapes[part])] * len(clip)
    cache = Cache(sizes)
    for clip in clips:
        clip.cache = cache


@user_error("cannot read meta_info_file", OSError, ValueError)
def _listed_names(file: str) -> dict[str, list[int]]:
    """Read clips and, if given, their number of frames and the first one: "000 100 (720,1280,3) 0"."""
    names = {}
    for line in Path(file).read_text().splitlines():
        name, *rest = re.sub(r"\(.*?\)", "", line).split() or [""]
        if name:
            names[name] = [int(number) for number in rest]
    return names


class Crops:
    """Random crops of `num_frame` frames, augmented; an epoch covers each frame about once.

    A sample depends on (seed, epoch, index) alone, so that any number of ranks and workers draws the same. It holds, by
    part, bytes of shape (frames, channels, height, width): "H" has `gt_size` pixels a side, "L" `gt_size` / scale, "S"
    half of `gt_size`.
    """

    def __init__(self, clips: list[Clip], data: dict[str, Any], seed: int, scale: int = 1) -> None:
        self.clips, self.seed, self.epoch = clips, seed, 0
        self.frames, self.size = data["num_frame"], data["gt_size"]
        self.flip, self.rotate = data["use_hflip"], data["use_rot"]
        self.intervals, self.reverse = data["interval_list"], data["random_reverse"]
        self.order = [*range(self.frames)]
        if data["mirror_sequence"]:
            self.order += self.order[::-1]
        elif data["pad_sequence"]:
            self.order += self.order[-1:]
        self.scales = {"H": 1, "L": scale, "S": 2}
        self.step = math.lcm(2, scale)  # crops begin at whole pixels of all parts
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
        top = self.step * int(rng.integers((clip.height - self.size) // self.step + 1))
        left = self.step * int(rng.integers((clip.width - self.size) // self.step + 1))
        flip, mirror, turn = rng.integers(2, size=3).astype(bool) & (self.flip, self.rotate, self.rotate)
        interval = self.intervals[int(rng.integers(len(self.intervals)))]
        first = min(first, len(clip) - 1 - (self.frames - 1) * interval)
        numbers = [first + i * interval for i in range(self.frames)]
        backwards = self.reverse and rng.random() < 0.5
        sample = {}
        for part in clip.parts:
            scale = self.scales[part]
            y, x, size = top // scale, left // scale, self.size // scale
            crop = np.stack([_cut(clip.frame(part, number), part, y, x, size) for number in numbers])
            crop = (reverse(crop, part) if backwards else crop)[self.order]
            crop = crop[..., ::-1] if flip else crop
            crop = crop[..., ::-1, :] if mirror else crop
            sample[part] = np.ascontiguousarray(crop.swapaxes(-1, -2) if turn else crop)
        return sample


def make_loader(crops: Crops, data: dict[str, Any], batch_size: int) -> ddpkit.Loader:
    """Make this rank's loader of crops."""
    if len(crops) < batch_size * ddpkit.get_world_size():
        raise UserError(f"an epoch's {len(crops)} crops do not fill one batch of all ranks: lower the batch size")
    names = ("shuffle", "pin_memory", "persistent_workers", "prefetch_factor")
    how = {name: data[f"dataloader_{name}"] for name in names}
    how |= {"seed": crops.seed, "drop_last": True, "num_workers": count_workers(data["dataloader_num_workers"])}
    with user_error("datasets.train.dataloader", ValueError):
        return ddpkit.make_loader(crops, batch_size, **how)


def count_workers(asked: int) -> int:
    """Limit the number of loading processes to this rank's share of the cores; the original's 32 are too many."""
    most = max(1, len(os.sched_getaffinity(0)) // ddpkit.get_local_world_size())
    if asked > most:
        log.info("%d loading processes per rank instead of %d: that is each rank's share of the cores", most, asked)
    return min(asked, most)


def reverse(frames: Any, part: str) -> Any:
    """Reverse time in an array or a tensor; spikes have two time axes."""
    axes = (0, 1) if part == "S" else (0,)
    return np.flip(frames, axes) if isinstance(frames, np.ndarray) else frames.flip(axes)


def _cut(frame: NDArray[np.uint8], part: str, y: int, x: int, size: int) -> NDArray[np.uint8]:
    """Cut a square out of a frame, channels first."""
    if part == "S":
        return frame[:, y : y + size, x : x + size]
    return frame[y : y + size, x : x + size].transpose(2, 0, 1)
