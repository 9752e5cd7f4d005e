"""Read demonstrations from disk: our shards and three public formats.

The content of a path in `train.data_path` decides its format:

    FOLDER/episodes-*.npz        ours, as `robot.collect` writes them
    FILE.hdf5                    robomimic's: data/demo_N/{actions, obs/NAME}
    FOLDER/meta/info.json        LeRobot's, versions 2 and 3: parquet, with videos or pictures
    FOLDER.zarr, FILE.zarr.zip   a replay buffer of diffusion policy's authors: data/NAME, meta/episode_ends

Each is a class with `actions`, the default name of the actions; `env_id`, the environment or ""; `episodes`, all or
those of a subset; and for an episode `names`, its entries; `numbers`, the default observations; `read`, all steps of an
entry; `length`, a camera's number of steps; `frames`, its pictures at ascending steps, (steps, height, width, 3) in
uint8. A format that stores an episode's number of steps raises a ValueError if the data differ. h5py, pyarrow with av,
and zarr are imported only when needed.
"""

from __future__ import annotations

import functools
import io
import itertools
import json
import os
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from shared.program import UserError, by_number

# what the libraries raise for a damaged file or another format
BROKEN = (OSError, ValueError, LookupError, TypeError, AttributeError, EOFError, zipfile.BadZipFile, zlib.error)
RLDS = (
    "RLDS and DROID's raw episodes are not supported: convert them to LeRobot's format (Hugging Face has DROID as "
    "lerobot/droid_1.0.1) or to robomimic's, and name the result in train.data_path"
)


def open_format(path: str) -> Format:
    """Open a path, once in every process: forked processes must not share open files."""
    return _open(path, os.getpid())


@functools.lru_cache(maxsize=64)
def _open(path: str, process: int) -> Format:
    place = Path(path)
    if place.suffix in (".hdf5", ".h5"):
        kind: Any = Robomimic
    elif place.suffix == ".zarr" or place.name.endswith(".zarr.zip"):
        kind = ReplayBuffer
    elif (place / "meta" / "info.json").is_file():
        kind = LeRobot
    else:
        kind = Shards
    try:
        return kind(place)
    except ImportError as error:
        raise UserError(
            f"{path} needs a package that is not installed ({error}): "
            "pip install -e '.[examples-robot-formats]' in the repository"
        ) from None
    except BROKEN as error:
        raise UserError(f"there are no demonstrations in {path} ({type(error).__name__}: {error})") from None


class Shards:
    """Files of several episodes each, in which `observations_0` and `actions_0` belong to the first, and so on."""

    actions = "actions"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = sorted(path.name for path in folder.glob("episodes-*.npz"))
        if not self.files and any(folder.rglob("*.tfrecord*")):
            raise UserError(f"{folder} holds TFRecords, but {RLDS}")
        if not self.files:
            raise UserError(
                f"there are no demonstrations in {folder}. Make some:  python -m robot.collect --folder {folder}"
            )

    @functools.cached_property
    def env_id(self) -> str:
        for file in self.files:
            if zipfile.is_zipfile(self.folder / file):
                with np.load(self.folder / file, allow_pickle=False) as shard:
                    return str(shard["env_id"])
        return ""

    def episodes(self, subset: str | None) -> list[str]:
        found = []
        for file in self.files:
            count = 1  # of a broken file: reading it will raise
            if zipfile.is_zipfile(self.folder / file):
                with np.load(self.folder / file, allow_pickle=False) as shard:
                    count = max(1, sum(name.startswith("actions_") for name in shard.files))
            found += [f"{file}/{number}" for number in range(count)]
        return found

    def names(self, episode: str) -> list[str]:
        file, number = episode.split("/")
        zipfile.ZipFile(self.folder / file).close()  # raises if it is not one; NumPy would take it for a pickle
        with np.load(self.folder / file, allow_pickle=False) as shard:
            return [name.removesuffix(f"_{number}") for name in shard.files if name.endswith(f"_{number}")]

    def numbers(self, episode: str) -> list[str]:
        return ["observations"]

    def read(self, episode: str, name: str) -> np.ndarray:
        file, number = episode.split("/")
        with np.load(self.folder / file, allow_pickle=False) as shard:
            return shard[f"{name}_{number}"]

    def length(self, episode: str, name: str) -> int:
        return len(_pictures(self, episode, name))

    def frames(self, episode: str, name: str, steps: np.ndarray) -> np.ndarray:
        return _pictures(self, episode, name)[steps]

    pictures = read


class Robomimic:
    """One HDF5 file; `mask/NAME` lists the episodes of a subset."""

    actions = "actions"

    def __init__(self, path: Path) -> None:
        import h5py

        self.path = path
        self.file = h5py.File(path, "r")
        data = self.file["data"]
        if gone := [name for name, demo in data.items() if demo is None]:
            raise UserError(f"{path}: {', '.join(gone)} in data are links to files that are not there")
        self.demos = {name: demo for name, demo in data.items() if isinstance(demo, h5py.Group)}
        self.env_id = (json.loads(data.attrs.get("env_args", "{}")) or {}).get("env_name") or ""

    def episodes(self, subset: str | None) -> list[str]:
        masks = self.file.get("mask", {})
        if subset is None:
            found = list(self.demos)
        elif subset in masks:
            found = [name.decode() for name in masks[subset]]
        else:
            there = ", ".join(masks) or "none"
            raise UserError(f"{self.path} has no subset {subset!r} of its episodes; there are: {there}")
        if missing := {*found} - {*self.demos}:
            raise UserError(f"{self.path}: mask/{subset} lists {', '.join(sorted(missing))}, not there in data")
        return sorted(found, key=by_number)

    def names(self, episode: str) -> list[str]:
        demo = self.demos[episode]
        return [*demo.get("obs", ()), *(name for name in demo if hasattr(demo[name], "shape"))]

    def numbers(self, episode: str) -> list[str]:
        seen = self.demos[episode].get("obs", {})
        return [name for name in seen if getattr(seen[name], "ndim", 0) == 2]

    def read(self, episode: str, name: str) -> np.ndarray:
        return self._entry(episode, name)[:]

    def frames(self, episode: str, name: str, steps: np.ndarray) -> np.ndarray:
        first = steps[0]
        return self._entry(episode, name)[first : steps[-1] + 1][steps - first]

    def length(self, episode: str, name: str) -> int:
        return len(self._entry(episode, name))

    def _entry(self, episode: str, name: str) -> Any:
        demo = self.demos[episode]
        entry = demo["obs"][name] if name in demo.get("obs", ()) else demo[name]
        count = demo.attrs.get("num_samples", len(entry))
        if count != len(entry):
            raise ValueError(f"num_samples says {count}, {name} has {len(entry)} rows")
        return entry


class ReplayBuffer:
    """A zarr group in which the episodes stand one after the other."""

    actions = "action"
    env_id = ""

    def __init__(self, path: Path) -> None:
        import zarr

        if not path.exists():
            raise FileNotFoundError(f"there is no {path}")
        store: Any = zarr.storage.ZipStore(str(path), mode="r") if path.suffix == ".zip" else str(path)
        buffer = zarr.open_group(store, mode="r")
        self.data, ends = buffer["data"], [0, *map(int, buffer["meta"]["episode_ends"][:])]
        self.arrays = sorted(self.data.array_keys())
        self.ranges = list(itertools.pairwise(ends))
        for start, end in self.ranges:
            if start > end:
                raise UserError(f"{path}: meta/episode_ends must ascend, but {end} comes after {start}")

    def episodes(self, subset: str | None) -> list[str]:
        return [str(number) for number in range(len(self.ranges))]

    def names(self, episode: str) -> list[str]:
        return self.arrays

    def numbers(self, episode: str) -> list[str]:
        return [name for name in self.arrays if name in ("obs", "state")]  # others may hold the future

    def read(self, episode: str, name: str) -> np.ndarray:
        start, end = self._range(episode, name)
        return _array(self, name)[start:end]

    def length(self, episode: str, name: str) -> int:
        start, end = self._range(episode, name)
        return end - start

    def _range(self, episode: str, name: str) -> tuple[int, int]:
        (start, end), rows = self.ranges[int(episode)], self.data[name].shape[0]
        is_last = end == self.ranges[-1][1]
        if end > rows or (is_last and end < rows):
            raise ValueError(f"episode_ends says {end}, {name} has {rows} rows")
        return start, end

    def frames(self, episode: str, name: str, steps: np.ndarray) -> np.ndarray:
        first = self.ranges[int(episode)][0] + steps[0]
        frames = self.data[name][first : first + steps[-1] - steps[0] + 1][steps - steps[0]]
        return frames.astype(np.uint8)  # some hold 0 to 255 as floats


class LeRobot:
    """A folder of parquet tables, and of videos if pictures are not in the tables.

    Version 2 has a table and videos for each episode; in version 3 several episodes share them.
    """

    actions = "action"
    env_id = ""

    def __init__(self, folder: Path) -> None:
        import pyarrow.parquet

        self.tables = pyarrow.parquet
        self.folder = folder
        self.info = json.loads((folder / "meta" / "info.json").read_text())
        self.features = self.info["features"]
        self.rows = {str(row["episode_index"]): row for row in self._about()}  # of each episode

    def _about(self) -> list[dict[str, Any]]:
        lines = self.folder / "meta" / "episodes.jsonl"
        if lines.is_file():
            return [json.loads(line) for line in lines.read_text().splitlines() if line]
        rows: list[dict[str, Any]] = []
        for path in sorted((self.folder / "meta" / "episodes").rglob("*.parquet")):
            rows += self.tables.read_table(path).to_pylist()
        return rows

    def episodes(self, subset: str | None) -> list[str]:
        return list(self.rows)

    def names(self, episode: str) -> list[str]:
        return list(self.features)

    def numbers(self, episode: str) -> list[str]:
        numeric = [name for name, about in self.features.items() if about["dtype"].startswith(("float", "int"))]
        return [name for name in numeric if name.startswith("observation")]

    def read(self, episode: str, name: str) -> np.ndarray:
        episodes, values = _columns(self._path(self.info["data_path"], episode, "data"), name)
        values, count = values[episodes == int(episode)], self.rows[episode]["length"]
        if len(values) != count:
            raise ValueError(f"meta says {count} steps, {name} has {len(values)} rows")
        return values

    def length(self, episode: str, name: str) -> int:
        return int(self.rows[episode]["length"])

    def _path(self, template: str, episode: str, section: str, **more: str) -> Path:
        """Fill in a path's template with the episode's number (version 2) or its file's numbers (version 3)."""
        row = self.rows[episode]
        number = int(episode)
        places = {
            "episode_index": number,
            "episode_chunk": number // self.info.get("chunks_size", 1000),
            "chunk_index": row.get(f"{section}/chunk_index", 0),
            "file_index": row.get(f"{section}/file_index", 0),
        }
        return self.folder / template.format(**places, **more)

    def frames(self, episode: str, name: str, steps: np.ndarray) -> np.ndarray:
        if self.features[name]["dtype"] == "video":
            return self._filmed(episode, name, steps)
        return _pictures(self, episode, name)[steps]

    def pictures(self, episode: str, name: str) -> np.ndarray:
        from PIL import Image

        path, wanted = self._path(self.info["data_path"], episode, "data"), [("episode_index", "=", int(episode))]
        table = self.tables.read_table(path, columns=[name], filters=wanted, use_threads=False)
        stored = table[name].to_pylist()
        return np.stack([np.asarray(Image.open(io.BytesIO(picture["bytes"])).convert("RGB")) for picture in stored])

    def _filmed(self, episode: str, name: str, steps: np.ndarray) -> np.ndarray:
        path = self._path(self.info["video_path"], episode, f"videos/{name}", video_key=name)
        begin = self.rows[episode].get(f"videos/{name}/from_timestamp", 0.0)
        return _decode(path, begin + steps / self.info["fps"], tolerance=0.5 / self.info["fps"])


Format = Shards | Robomimic | ReplayBuffer | LeRobot


@functools.lru_cache(maxsize=256)
def _pictures(demonstrations: Shards | LeRobot, episode: str, name: str) -> np.ndarray:
    """Read all pictures of an episode: these formats cannot read single ones."""
    return demonstrations.pictures(episode, name)


@functools.cache
def _array(buffer: ReplayBuffer, name: str) -> np.ndarray:
    """Read a whole array: its chunks are not the episodes."""
    return buffer.data[name][:]


@functools.lru_cache(maxsize=256)
def _columns(path: Path, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Read the episodes and numbers of all rows: to search for one of many episodes takes nearly as long."""
    import pyarrow.parquet

    names = ["episode_index", name]
    table = pyarrow.parquet.read_table(path, columns=names, use_threads=False)  # for forked processes
    column = table[name].combine_chunks()
    while hasattr(column, "flatten"):  # a list in each row
        column = column.flatten()
    values = column.to_numpy(zero_copy_only=False).reshape(len(table), -1)
    return table["episode_index"].to_numpy(), values


def _decode(path: Path, moments: Sequence[float] | np.ndarray, tolerance: float) -> np.ndarray:
    """Decode a video's frames at ascending times in seconds, starting at the key frame before the first."""
    import av

    found: list[np.ndarray] = []
    with av.open(str(path)) as video:
        stream = video.streams.video[0]
        video.seek(int(moments[0] / stream.time_base), stream=stream)
        for frame in video.decode(stream):
            while len(found) < len(moments) and frame.time > moments[len(found)] - tolerance:
                if frame.time > moments[len(found)] + tolerance:
                    raise ValueError(f"{path} has no frame at {moments[len(found)]:.3f} s")
                found.append(frame.to_ndarray(format="rgb24"))
            if len(found) == len(moments):
                return np.stack(found)
    raise ValueError(f"{path} ends before {moments[len(found)]:.3f} s")
