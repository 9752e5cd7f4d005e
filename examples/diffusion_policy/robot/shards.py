"""Demonstrations on disk, and as a stream of samples that ranks and their loading processes share out.

A folder holds shards, `episodes-*.npz`, of several episodes each. In a shard, `observations_0` and `actions_0` are an
episode's arrays of shape (steps, numbers), and so on with 1, 2, ...; `env_id` names its environment.
"""

from __future__ import annotations

import functools
import logging
import os
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from shared.program import UserError, user_error
from torch.utils.data import IterableDataset
from tqdm import tqdm

import ddpkit

log = logging.getLogger("robot")
# what numpy and zipfile raise for a file that is damaged, or is something else
BROKEN = (OSError, ValueError, KeyError, TypeError, AttributeError, EOFError, zipfile.BadZipFile, zlib.error)


@dataclass(frozen=True)
class Episode:
    """Where one episode is: its shard, its number in it, and how many steps it has."""

    path: str
    number: int
    steps: int


@dataclass(frozen=True)
class Index:
    """What is in the folders: episodes by folder, the environment, and the observations' mean and spread."""

    folders: list[list[Episode]]
    env_id: str
    action_size: int
    mean: np.ndarray
    std: np.ndarray

    @property
    def steps(self) -> list[int]:
        """Environment steps by folder: each is a sample."""
        return [sum(episode.steps for episode in folder) for folder in self.folders]


def write_shard(path: Path, env_id: str, episodes: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
    """Writes (observations, actions) of several episodes; the file is whole or not there."""
    arrays = {}
    for number, (observations, actions) in enumerate(episodes):
        arrays[f"observations_{number}"] = observations.astype(np.float32)
        arrays[f"actions_{number}"] = actions.astype(np.float32)
    temporary = path.with_name(f"{path.name}.tmp")
    with open(temporary, "wb") as file:
        np.savez(file, env_id=np.array(env_id), **arrays)
    os.replace(temporary, path)


@functools.lru_cache(maxsize=4096)
def read_episode(path: str, number: int) -> tuple[np.ndarray, np.ndarray]:
    """An episode's observations and actions, in float32 whatever they are in on the disk."""
    with user_error(f"{path} was whole at the start and cannot be read any more", *BROKEN):
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as shard:
            return shard[f"observations_{number}"].astype(np.float32), shard[f"actions_{number}"].astype(np.float32)


def scan(folders: Sequence[str], on_broken: str) -> Index:
    """Reads and checks all shards of the folders.

    Args:
        folders: Their paths.
        on_broken: "error" stops at a broken shard; "skip" warns and leaves it out.

    Raises:
        UserError: Without episodes, at a broken shard, or if the folders do not fit together.
    """
    found: list[list[Episode]] = []
    kinds: dict[tuple[str, int, int], str] = {}
    count, total, squares = 0, np.zeros(()), np.zeros(())
    for folder in folders:
        paths = sorted(Path(folder).glob("episodes-*.npz"))
        found.append([])
        for path in tqdm(paths, f"reading {folder}", unit="shard", leave=False, disable=None):
            try:
                env_id, episodes = _read_shard(path)
            except BROKEN as error:
                if on_broken == "error":
                    raise _broken(path, error) from None
                log.warning("skipped: %s", _broken(path, error))
                continue
            for number, (observations, actions) in enumerate(episodes):
                found[-1].append(Episode(str(path), number, len(actions)))
                kinds.setdefault((env_id, observations.shape[1], actions.shape[1]), str(path))
                if len(kinds) > 1:
                    raise UserError(f"the demonstrations do not fit together (environment, sizes): {kinds}")
                values = observations.astype(np.float64)
                count, total, squares = count + len(values), total + values.sum(0), squares + (values**2).sum(0)
        if not found[-1]:
            raise UserError(
                f"there are no demonstrations in {folder}"
                + (f": all of its {len(paths)} shards are broken" if paths else "")
                + f". Make some:  python -m robot.collect --folder {folder}"
            )
    mean = total / count
    std = np.sqrt(np.maximum(squares / count - mean**2, 0))
    ((env_id, _, action_size),) = kinds
    return Index(found, env_id, action_size, mean, np.where(std > 1e-4, std, 1.0))  # what never moves stays 0


def _read_shard(path: Path) -> tuple[str, list[tuple[np.ndarray, np.ndarray]]]:
    zipfile.ZipFile(path).close()  # raises if it is none; NumPy would take it for a pickle
    with open(path, "rb") as file, np.load(file, allow_pickle=False) as shard:
        episodes = [
            (shard[f"observations_{number}"], shard[f"actions_{number}"])
            for number in range((len(shard.files) - 1) // 2)
        ]
        if not episodes:
            raise ValueError("it holds no episode")
        for observations, actions in episodes:
            if observations.ndim != 2 or actions.ndim != 2 or not 0 < len(actions) == len(observations):
                raise ValueError(f"observations {observations.shape} and actions {actions.shape} do not fit")
            if not (np.isfinite(observations).all() and (np.abs(actions) <= 1).all()):
                raise ValueError("observations must be finite and actions within [-1, 1]")
        return str(shard["env_id"]), episodes


def _broken(path: str | Path, error: Exception) -> UserError:
    reason = str(error).strip() or type(error).__name__
    return UserError(f"{path} is broken: {reason}. Make it again, delete it, or set train.on_broken_shard=skip")


def deal(episodes: int, seed: int, epoch: int, index: int, num_shards: int) -> np.ndarray:
    """The numbers of the episodes that reader `index` of `num_shards` has in an epoch.

    Each episode goes to one reader, and each epoch deals anew, so that in the long run all count the same although
    their number may not divide.
    """
    order = np.random.default_rng(ddpkit.sample_seed(seed, epoch, 0)).permutation(episodes)
    return order[index::num_shards]


class Samples(IterableDataset[dict[str, np.ndarray]]):
    """An endless stream of samples: windows of observations and actions, shuffled in a buffer.

    `make_loader` calls `shard()` once for each rank and loading process. A reader has episodes of its own in an epoch,
    goes through them again and again in ever new order, and yields what it draws from its buffer. What it yields is a
    function of (seed, epoch, index, num_shards).

    Args:
        index: What there is.
        weights: Share of the samples by folder, in any unit; None: by their steps.
        observation_horizon: Observations in a sample, up to the present one.
        prediction_horizon: Actions in a sample, from that of the oldest observation on.
        buffer_size: Samples in the buffer, per reader.
        seed: Of dealing and shuffling.
    """

    def __init__(
        self,
        index: Index,
        *,
        weights: Sequence[float] | None,
        observation_horizon: int,
        prediction_horizon: int,
        buffer_size: int,
        seed: int,
    ) -> None:
        self.index, self.seed, self.buffer_size, self.epoch = index, seed, buffer_size, 0
        self.horizons = observation_horizon, prediction_horizon
        self.weights = np.array(index.steps if weights is None else weights, float)

    def set_epoch(self, epoch: int) -> None:
        """Told by the loader, in every process that reads."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        return self.shard(0, 1)

    def shard(self, index: int, num_shards: int) -> Iterator[dict[str, np.ndarray]]:
        """The samples of reader `index`."""
        rng = np.random.default_rng(ddpkit.sample_seed(self.seed, self.epoch, 1 + index))
        folders = [self._steps(folder, index, num_shards, rng) for folder in self.index.folders]
        choice = self.weights / self.weights.sum()
        buffer: list[tuple[Episode, int]] = []
        while True:
            number = int(rng.choice(len(folders), p=choice)) if len(folders) > 1 else 0
            step = next(folders[number])
            if len(buffer) < self.buffer_size:
                buffer.append(step)
                continue
            place = int(rng.integers(self.buffer_size))
            drawn, buffer[place] = buffer[place], step
            yield self._sample(*drawn)

    def _steps(
        self, episodes: list[Episode], index: int, num_shards: int, rng: np.random.Generator
    ) -> Iterator[tuple[Episode, int]]:
        mine = [episodes[number] for number in deal(len(episodes), self.seed, self.epoch, index, num_shards)]
        while True:
            for number in rng.permutation(len(mine)):
                for step in range(mine[number].steps):
                    yield mine[number], step

    def _sample(self, episode: Episode, step: int) -> dict[str, np.ndarray]:
        return cut(*read_episode(episode.path, episode.number), step, *self.horizons)


def cut(
    observations: np.ndarray, actions: np.ndarray, step: int, observation_horizon: int, prediction_horizon: int
) -> dict[str, np.ndarray]:
    """The sample of one step; before the beginning and after the end the first and the last repeat."""
    first, last = step + 1 - observation_horizon, len(actions) - 1
    seen = np.arange(first, step + 1).clip(0)
    planned = np.arange(first, first + prediction_horizon).clip(0, last)
    return {"observations": observations[seen], "actions": actions[planned]}


def stack(samples: list[dict[str, np.ndarray]]) -> dict[str, torch.Tensor]:
    """A batch of samples."""
    return {key: torch.from_numpy(np.stack([sample[key] for sample in samples])) for key in samples[0]}


def make_loader(index: Index, config: dict[str, Any], batch_size: int) -> Any:
    """This rank's loader of `batch_size` samples; endless, so take as many batches as an epoch has.

    Raises:
        UserError: If there are more readers than episodes.
    """
    workers = config["train.num_data_workers"]
    readers = ddpkit.get_world_size() * max(1, workers)
    for folder, episodes in zip(config["train.data_path"], index.folders, strict=True):
        if len(episodes) < readers:
            raise UserError(
                f"{folder} has {len(episodes)} episodes, but {readers} readers (ranks x loading processes) need one "
                "each: collect more, or use fewer ranks or a smaller train.num_data_workers"
            )
    samples = Samples(
        index,
        weights=config["train.sample_weights"],
        observation_horizon=config["algo.horizon.observation_horizon"],
        prediction_horizon=config["algo.horizon.prediction_horizon"],
        buffer_size=config["train.shuffle_buffer_size"],
        seed=config["train.seed"],
    )
    more = {"prefetch_factor": config["train.prefetch_factor"]} if workers else {}
    return ddpkit.make_loader(
        samples,
        batch_size,
        seed=config["train.seed"],
        num_workers=workers,
        pin_memory=config["train.pin_memory"],
        persistent_workers=config["train.persistent_workers"],
        collate_fn=stack,
        **more,
    )
