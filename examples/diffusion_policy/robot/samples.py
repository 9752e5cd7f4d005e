"""Samples of demonstrations, their statistics, and their order.

A sample depends on the seed, the epoch and its number alone: its moment and episode, the noise on its actions, the
noise level, and the crop of its pictures. So any rank, and any loading process, makes the same.
"""

from __future__ import annotations

import functools
import logging
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from shared.program import UserError, hides_bar, user_error
from torch import nn
from torch.utils.data import Dataset
from tqdm import tqdm

import ddpkit

from .formats import BROKEN, open_format

log = logging.getLogger("robot")


@dataclass(frozen=True)
class Episode:
    """An episode: its path in `train.data_path`, its name there, and its number of steps."""

    path: str
    name: str
    steps: int


@dataclass(frozen=True)
class Entries:
    """Names of the used entries of an episode: observed numbers, cameras and actions."""

    numbers: tuple[str, ...]
    cameras: tuple[str, ...]
    actions: tuple[str, ...]


CONSTANT = 1e-6  # of its size, within which a number is constant: float32 rounds by a tenth of it


@dataclass(frozen=True)
class Statistics:
    """Statistics of all observations and actions, by number."""

    mean: np.ndarray  # of the observations
    std: np.ndarray
    low: np.ndarray  # of the actions
    high: np.ndarray


@dataclass(frozen=True)
class Index:
    """The episodes for training, by path, and for validation."""

    folders: list[list[Episode]]
    held_out: list[Episode]
    entries: Entries
    env_id: str
    statistics: Statistics
    picture_sizes: dict[str, tuple[int, int]]  # height and width by camera

    @property
    def rendered_size(self) -> tuple[int, int] | None:
        """Height and width of an environment's rendering, if the policy observes it."""
        return self.picture_sizes.get("camera")

    @property
    def steps(self) -> list[int]:
        return [sum(episode.steps for episode in folder) for folder in self.folders]

    def __str__(self) -> str:
        used = ", ".join([*self.entries.numbers, *self.entries.cameras])
        held_out = f", and {len(self.held_out)} episodes held out" if self.held_out else ""
        return f"{sum(map(len, self.folders))} episodes, {sum(self.steps)} samples of {used}{held_out}"


def write_shard(path: Path, env_id: str, episodes: Sequence[dict[str, np.ndarray]]) -> None:
    """Write several episodes, each a mapping from names to arrays; the file appears when it is complete."""
    arrays = {f"{name}_{i}": values for i, episode in enumerate(episodes) for name, values in episode.items()}
    temporary = path.with_name(f"{path.name}.tmp")
    with open(temporary, "wb") as file:
        np.savez(file, env_id=np.array(env_id), **arrays)
    os.replace(temporary, path)


@functools.cache
def read_episode(path: str, name: str, entries: Entries) -> tuple[np.ndarray, np.ndarray]:
    """Read and cache an episode's observed numbers and its actions, (steps, numbers) in float32."""
    numbers, actions = (_read(path, name, names) for names in (entries.numbers, entries.actions))
    names = [*entries.numbers, *entries.actions, *entries.cameras]
    lengths = [len(part) for part in [*numbers, *actions]]
    lengths += [open_format(path).length(name, camera) for camera in entries.cameras]
    if len({*lengths}) > 1 or not lengths[0]:
        found = [f"{length} of {entry}" for length, entry in zip(lengths, names, strict=True)]
        raise ValueError(f"all entries must have the same number of steps, at least one: {', '.join(found)}")
    nothing = np.zeros((lengths[0], 0), np.float32)  # a policy may observe pictures alone
    return np.concatenate(numbers or [nothing], axis=1), np.concatenate(actions, axis=1)


def _read(path: str, name: str, names: Sequence[str]) -> list[np.ndarray]:
    parts = [open_format(path).read(name, entry) for entry in names]
    texts = [entry for entry, part in zip(names, parts, strict=True) if part.dtype.kind not in "biuf"]
    if texts:
        raise UserError(f"{path}: {', '.join(texts)} holds no numbers: remove it (language is not supported)")
    return [part.reshape(len(part), math.prod(part.shape[1:])).astype(np.float32) for part in parts]


KIND = "environment", "numbers of an observation", "numbers of an action", "height and width of the cameras' pictures"


@dataclass(frozen=True)
class Measured:
    """The measurements of one episode."""

    episode: Episode
    kind: tuple[str, int, int, tuple[tuple[int, int], ...]]  # must be equal in all episodes: see `KIND`
    sums: np.ndarray  # of the observations, and of their squares
    squares: np.ndarray
    low: np.ndarray  # of the actions
    high: np.ndarray


def measure(path: str, name: str, entries: Entries) -> Measured:
    """Read and check an episode."""
    there = open_format(path).names(name)
    missing = {*entries.numbers, *entries.cameras, *entries.actions} - {*there}
    if missing:
        raise BrokenEpisode(
            f"{path}, episode {name}, has no {', '.join(sorted(missing))}; it has {', '.join(there)}: choose in "
            "observation.modalities.obs.low_dim and .rgb, and in train.action_keys or, if other episodes have it, set "
            "train.on_broken_shard=skip"
        )
    observations, actions = read_episode(path, name, entries)
    if not (np.isfinite(observations).all() and np.isfinite(actions).all()):
        raise ValueError("observations and actions must be finite")
    last = np.array([len(actions) - 1])  # missing in a film that is too short
    sizes = tuple(look(path, name, camera, last).shape[1:3] for camera in entries.cameras)
    exact, episode = observations.astype(np.float64), Episode(path, name, len(actions))
    kind = open_format(path).env_id, observations.shape[1], actions.shape[1], sizes
    return Measured(episode, kind, exact.sum(0), (exact**2).sum(0), actions.min(0), actions.max(0))


def look(path: str, name: str, camera: str, steps: np.ndarray) -> np.ndarray:
    """Read pictures of an episode at some steps, (steps, height, width, 3)."""
    frames = open_format(path).frames(name, camera, steps)
    if frames.ndim != 4 or frames.shape[3] != 3 or frames.dtype != np.uint8:
        raise ValueError(f"{camera} must hold pictures (steps, height, width, 3) in uint8, not {frames.shape[1:]}")
    return frames


class BrokenEpisode(UserError):
    """An episode that cannot be read or used."""


def scan(config: dict[str, Any]) -> Index:
    """Read every episode, each on one rank; the statistics have the same bits on any number of ranks. Collective."""
    episodes, held_out, entries = ddpkit.run_on_main(list_episodes, config)
    mine = range(ddpkit.get_rank(), len(episodes), ddpkit.get_world_size())
    bar = tqdm(mine, "reading", unit="episode", leave=False, disable=hides_bar())
    outcomes = [_try_to_measure(*episodes[number], entries) for number in bar]
    measured = []
    for outcome in ddpkit.gather_exact(outcomes, list(mine), len(episodes)):
        if isinstance(outcome, Measured):
            measured.append(outcome)
        elif not isinstance(outcome, BrokenEpisode) or config["train.on_broken_shard"] != "skip":
            raise outcome
        elif ddpkit.is_main_process():
            log.warning("skipped: %s", outcome)
    return _sum_up(config, held_out, entries, measured)


def list_episodes(config: dict[str, Any]) -> tuple[list[tuple[str, str]], set[tuple[str, str]], Entries]:
    """List all episodes by path and name, the held-out ones among them, and the used entries."""
    episodes: list[tuple[str, str]] = []
    held_out: set[tuple[str, str]] = set()
    subset, validation = config["train.hdf5_filter_key"], config["train.hdf5_validation_filter_key"]
    for path in config["train.data_path"]:
        names = open_format(path).episodes(subset)
        if not names:
            raise UserError(f"there are no demonstrations in {path}")
        kept = []
        if config["experiment.validate"] and validation:
            kept = open_format(path).episodes(validation)
            names = [name for name in names if name not in kept] + kept
        elif config["experiment.validate"]:
            count = max(1, round(config["train.validation_fraction"] * len(names)))
            drawn = np.random.default_rng(config["train.seed"]).permutation(len(names))
            kept = [names[number] for number in drawn[:count]]
        episodes += [(path, name) for name in names]
        held_out |= {(path, name) for name in kept}
    first, name = open_format(episodes[0][0]), episodes[0][1]
    numbers = tuple(config["observation.modalities.obs.low_dim"] or first.numbers(name))
    cameras = tuple(config["observation.modalities.obs.rgb"])
    actions = tuple(config["train.action_keys"] or [first.actions])
    if not numbers and not cameras:
        raise UserError(
            f"{config['train.data_path'][0]} does not name its observations: set observation.modalities.obs.low_dim "
            f"and .rgb to some of {', '.join(first.names(name))}"
        )
    return episodes, held_out, Entries(numbers, cameras, actions)


def _try_to_measure(path: str, name: str, entries: Entries) -> Measured | UserError:
    try:
        return measure(path, name, entries)
    except UserError as error:
        return error
    except BROKEN as error:
        reason = str(error).strip() or type(error).__name__
        remedy = "Record it again, delete it, or set train.on_broken_shard=skip"
        return BrokenEpisode(f"{path}: episode {name} is broken: {reason}. {remedy}")


def _sum_up(
    config: dict[str, Any], held_out: set[tuple[str, str]], entries: Entries, measured: list[Measured]
) -> Index:
    check_kinds(measured)
    validation = [one.episode for one in measured if (one.episode.path, one.episode.name) in held_out]
    training = [one for one in measured if (one.episode.path, one.episode.name) not in held_out]
    folders = []
    for path in config["train.data_path"]:
        folders.append([one.episode for one in training if one.episode.path == path])
        if not folders[-1]:
            raise UserError(f"{path} has no episode to train on: all are broken or held out for validation")
    if config["experiment.validate"] and not validation:
        raise UserError("no episode is held out for validation: raise train.validation_fraction")
    count = sum(one.episode.steps for one in training)
    mean = sum(one.sums for one in training) / count
    std = np.sqrt(np.maximum(sum(one.squares for one in training) / count - mean**2, 0))
    std = np.where(std > CONSTANT * np.abs(mean), std, 1.0)  # constant numbers stay 0
    low = np.min([one.low for one in training], axis=0)
    high = np.max([one.high for one in training], axis=0)
    env_id, _, _, sizes = measured[0].kind
    for size in sizes:
        Framing.of(config).check(*size)
    still = (high > low) & (high - low <= 2 * CONSTANT * np.maximum(np.abs(high), np.abs(low)))
    if still.any() and ddpkit.is_main_process():
        numbers = ", ".join(f"{number} ({low[number]:g} to {high[number]:g})" for number in np.flatnonzero(still))
        log.warning("numbers of an action that change too little for float32 count as constant: %s", numbers)
    env_id, statistics = config["experiment.env"] or env_id, Statistics(mean, std, low, high)
    return Index(folders, validation, entries, env_id, statistics, dict(zip(entries.cameras, sizes, strict=True)))


def check_kinds(measured: list[Measured]) -> None:
    """Raise, with examples, if the episodes differ in one of `KIND`."""
    for name, values in zip(KIND, zip(*(one.kind for one in measured), strict=True), strict=False):
        found = []
        for value in dict.fromkeys(values):
            episode = measured[values.index(value)].episode
            found.append(f"{value or 'none'} in {values.count(value)}, as in {episode.path}, episode {episode.name}")
        if len(found) > 1:
            raise UserError(
                f"the demonstrations do not fit together: episodes differ in {name}: {'; '.join(found)}. "
                "Remove some from train.data_path, or choose entries that all share in "
                "observation.modalities.obs.low_dim and .rgb, and in train.action_keys"
            )


class Samples(Dataset[dict[str, np.ndarray]]):
    """The `length` samples of an epoch, in the order in which all ranks together take them.

    Paths are drawn by weight, by default by their number of steps. In an epoch, no moment of a path repeats before all
    others were drawn.
    """

    def __init__(
        self, folders: list[list[Episode]], entries: Entries, *, length: int, weights: Any, config: dict[str, Any]
    ) -> None:
        self.entries, self.length = entries, length
        self.episodes = [episode for folder in folders for episode in folder]
        self.sizes = [sum(episode.steps for episode in folder) for folder in folders]
        shares = np.array(self.sizes if weights is None else weights, float)
        self.shares = shares / shares.sum()
        self.seed, self.epoch = config["train.seed"], 0
        self.observed = config["algo.horizon.observation_horizon"]
        self.predicted = config["algo.horizon.prediction_horizon"]
        self.noising_steps = config["algo.ddpm.num_train_timesteps"]
        self.framing = Framing.of(config)
        self.order_epoch = -1  # of the order drawn last

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, number: int) -> dict[str, np.ndarray]:
        episode, step = self.place(number)
        observations, actions = read_episode(episode.path, episode.name, self.entries)
        rng = np.random.default_rng(ddpkit.sample_seed(self.seed, self.epoch, number))
        sample = cut(observations, actions, step, self.observed, self.predicted)
        sample["noise"] = rng.standard_normal(sample["actions"].shape, dtype=np.float32)
        sample["step"] = rng.integers(self.noising_steps)
        for camera in self.entries.cameras:
            steps = np.maximum(np.arange(step + 1 - self.observed, step + 1), 0)
            frames = look(episode.path, episode.name, camera, steps)
            sample[camera] = self.framing(torch.from_numpy(frames), rng.random(2)).numpy()
        return sample

    def place(self, number: int) -> tuple[Episode, int]:
        """Return the episode, and the step in it, of a sample of this epoch."""
        if self.order_epoch != self.epoch:
            self.order, self.order_epoch = self._draw_order(), self.epoch
        episodes, steps = self.order
        return self.episodes[episodes[number]], int(steps[number])

    def _draw_order(self) -> tuple[np.ndarray, np.ndarray]:
        """Draw episode and step of each sample: shuffle all moments of each path, as often as needed."""
        rng = np.random.default_rng(ddpkit.sample_seed(self.seed, self.epoch, self.length))
        folders = rng.choice(len(self.sizes), size=self.length, p=self.shares)
        moments = np.zeros(self.length, int)  # counted through all paths
        first = 0
        for folder, size in enumerate(self.sizes):
            places = np.flatnonzero(folders == folder)
            for start in range(0, len(places), size):
                part = places[start : start + size]
                moments[part] = first + rng.permutation(size)[: len(part)]
            first += size
        steps = np.array([episode.steps for episode in self.episodes])
        ends = np.cumsum(steps)
        episodes = np.searchsorted(ends, moments, side="right")
        return episodes, moments - (ends - steps)[episodes]


def cut(
    observations: np.ndarray, actions: np.ndarray, step: int, observation_horizon: int, prediction_horizon: int
) -> dict[str, np.ndarray]:
    """Cut out the numbers of one sample; before the start and after the end, the first and the last repeat."""
    first, last = step + 1 - observation_horizon, len(actions) - 1
    seen = np.maximum(np.arange(first, step + 1), 0)
    planned = np.maximum(np.minimum(np.arange(first, first + prediction_horizon), last), 0)
    return {"observations": observations[seen], "actions": actions[planned]}


class Framing(NamedTuple):
    """How pictures are scaled and then cropped, each to (height, width) or, if None, not at all."""

    scaled: list[int] | None
    cropped: list[int] | None

    @classmethod
    def of(cls, config: dict[str, Any]) -> Framing:
        """Read the settings."""
        randomizer = "observation.encoder.rgb.obs_randomizer_"
        crop = [config[f"{randomizer}kwargs.crop_{name}"] for name in ("height", "width")]
        return cls(config["observation.image_dim"], crop if config[f"{randomizer}class"] else None)

    def check(self, height: int, width: int) -> None:
        """Raise if crops do not fit into pictures of this size."""
        height, width = self.scaled or (height, width)
        high, wide = self.cropped or (0, 0)
        if high > height or wide > width:
            raise UserError(
                f"crops of {high} x {wide} (height x width) do not fit into pictures of {height} x {width}: lower "
                "observation.encoder.rgb.obs_randomizer_kwargs.crop_height and crop_width, or raise "
                "observation.image_dim, to which pictures are scaled first"
            )

    def __call__(self, frames: torch.Tensor, place: Sequence[float]) -> torch.Tensor:
        """Frame pictures (..., height, width, 3) in uint8; `place` says where to crop, from 0 to 1 down and right."""
        if self.scaled:
            flat = frames.flatten(0, -4).permute(0, 3, 1, 2).float()
            flat = nn.functional.interpolate(flat, self.scaled, mode="bilinear", antialias=True).round().byte()
            frames = flat.permute(0, 2, 3, 1).unflatten(0, frames.shape[:-3])
        if self.cropped:
            height, width = self.cropped
            top = int(place[0] * (frames.shape[-3] - height + 1))
            left = int(place[1] * (frames.shape[-2] - width + 1))
            frames = frames[..., top : top + height, left : left + width, :]
        return frames


def make_loader(index: Index, config: dict[str, Any], batch_size: int) -> Any:
    """Make this rank's loader of `batch_size` samples, with as many batches as an epoch has."""
    batches = config["experiment.epoch_every_n_steps"] * config["train.gradient_accumulation_steps"]
    length, weights = batches * batch_size * ddpkit.get_world_size(), config["train.sample_weights"]
    samples = Samples(index.folders, index.entries, length=length, weights=weights, config=config)
    return _load(samples, config, batch_size, shuffle=False)  # the samples are in an order of their own


def make_validation_loader(index: Index, config: dict[str, Any], batch_size: int) -> Any:
    """Make this rank's loader of its share of the held-out samples, or of some of them."""
    most = config["experiment.validation_epoch_every_n_steps"] * batch_size * ddpkit.get_world_size()
    length = min(most, sum(episode.steps for episode in index.held_out))
    samples = Samples([index.held_out], index.entries, length=length, weights=None, config=config)
    return _load(samples, config, batch_size, train=False)


@user_error("train", ValueError)
def _load(samples: Samples, config: dict[str, Any], batch_size: int, **how: bool) -> Any:
    return ddpkit.make_loader(
        samples,
        batch_size,
        seed=config["train.seed"],
        num_workers=config["train.num_data_workers"],
        pin_memory=config["train.pin_memory"],
        persistent_workers=config["train.persistent_workers"],
        prefetch_factor=config["train.prefetch_factor"],
        **how,
    )
