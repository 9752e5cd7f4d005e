"""Environments, scripted experts for the Fetch robot, episodes played in lock-step, and scores.

gymnasium-robotics' FetchPickAndPlace-v4: an arm lifts a block to a place on the table or above it; FetchReach-v4: it
moves its gripper to a place. An action is a velocity (x, y, z) of the gripper and of its fingers, each within [-1, 1].
Observations have names: "observations" is one vector, the environment's own with the goal at its end; "proprioception"
the arm's own state; "desired_goal"; and "camera" a picture.
"""

from __future__ import annotations

import atexit
import functools
import io
import json
import logging
import math
import os
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import gymnasium
import numpy as np
import torch
from gymnasium.envs.registration import EnvSpec
from PIL import Image
from shared.networks import find_class
from shared.program import UserError, hides_bar, user_error, users_code
from tqdm import trange

import ddpkit

from .policy import DiffusionPolicy
from .samples import Entries, Index

with redirect_stderr(io.StringIO()):  # it prints a note on environments that are not used here
    import gymnasium_robotics

gymnasium.register_envs(gymnasium_robotics)
logging.getLogger("OpenGL").setLevel(logging.WARNING)
UNSEEN = 1_000_000  # the first seed that no demonstration has: training evaluates on these and keeps the best model
FINAL = 2_000_000  # the first seed that chooses nothing either
AT_ONCE = 25  # environments in lock-step; more would only take memory
CAMERA = {"distance": 1.15, "azimuth": 150.0, "elevation": -35.0, "lookat": np.array([1.3, 0.75, 0.5])}
OF_THE_ARM = [0, 1, 2, 9, 10, 20, 21, 22, 23, 24]  # of 25 numbers: gripper, fingers, and their velocities
Seen = dict[str, np.ndarray]  # observations by name
Watch = Callable[[Seen], None]


class Player(Protocol):
    """Plays several episodes at once."""

    def begin(self, seeds: Sequence[int]) -> None:
        """Start new episodes with these seeds."""

    def act(self, seen: Seen) -> np.ndarray:
        """Return actions (episodes, numbers) for observations, each (episodes, ...)."""


class Arena:
    """Environments that play episodes of `horizon` steps in lock-step.

    With a picture size, (height, width), "camera" is what they render. MuJoCo renders without a screen through EGL or
    the backend that the environment variable MUJOCO_GL names.
    """

    def __init__(self, env_id: str, horizon: int, picture_size: Sequence[int] | None = None) -> None:
        self.env_id, self.horizon, self.picture_size = env_id, horizon, picture_size
        self.envs: list[gymnasium.Env] = []

    def try_out(self) -> tuple[Seen, int]:
        """Return the first observations of an episode, and how many numbers an action has."""
        self._make(1)
        return self._begin(self.envs[0], 0), math.prod(self.envs[0].action_space.shape or (1,))

    def try_step(self, action: np.ndarray) -> Seen:
        """Return the observations after a step; raise if its info does not say whether the goal is reached."""
        seen, _, info = self._step(self.envs[0], action)
        self._is_reached(info)
        return seen

    def play(self, player: Player, seeds: Sequence[int], watch: Watch | None = None) -> list[bool]:
        """Play one episode for each seed; an episode depends on its seed and the player alone.

        Return whether each reaches the goal at its end; passing it on the way is not enough. `watch` is called with the
        observations of each step of each episode.
        """
        self._make(min(AT_ONCE, len(seeds)))
        successes: list[bool] = []
        for start in trange(
            0, len(seeds), AT_ONCE, desc="episodes", unit=f" x {AT_ONCE}", leave=False, disable=hides_bar()
        ):
            wave = seeds[start : start + AT_ONCE]
            envs = self.envs[: len(wave)]
            seen = [self._begin(env, seed) for env, seed in zip(envs, wave, strict=True)]
            infos: list[dict[str, Any]] = [{} for _ in wave]
            over = [False for _ in wave]  # an episode that ends early keeps its last info
            player.begin(wave)
            for _ in range(self.horizon):
                for one in seen if watch else ():
                    watch(one)
                actions = player.act({name: np.stack([one[name] for one in seen]) for name in seen[0]})
                for number, env in enumerate(envs):
                    if not over[number]:
                        seen[number], over[number], infos[number] = self._step(env, actions[number])
            successes += [self._is_reached(info) for info in infos]
        return successes

    def close(self) -> None:
        for env in self.envs:
            env.close()

    def _make(self, count: int) -> None:
        remedy = "; pip install -e '.[examples-robot]' in the repository" if self.env_id in EXPERTS else ""
        while len(self.envs) < count:
            with users_code(f"{self.env_id} cannot be made", remedy):
                self.envs.append(make_environment(self.env_id, self.horizon, self.picture_size))

    def _begin(self, env: gymnasium.Env, seed: int) -> Seen:
        with users_code(f"{self.env_id} fails in reset(seed={seed})"):
            return self._see(env, env.reset(seed=seed)[0])

    def _step(self, env: gymnasium.Env, action: np.ndarray) -> tuple[Seen, bool, dict[str, Any]]:
        with users_code(f"{self.env_id} fails in step()"):
            found, _, terminated, truncated, info = env.step(action)
            return self._see(env, found), terminated or truncated, info

    def _is_reached(self, info: dict[str, Any]) -> bool:
        for name in ("is_success", "success"):
            if name in info:
                return bool(info[name])
        raise UserError(
            f"the info of {self.env_id} must say in 'success' or 'is_success', after each step, whether the goal is "
            f"reached; it holds {', '.join(map(repr, info)) or 'nothing'}: add one"
        )

    def _see(self, env: gymnasium.Env, found: Any) -> Seen:
        """Name an environment's observations; for the Fetch robot, add "observations", the vector of all numbers."""
        if not isinstance(found, dict):
            found = {"observations": found}
        seen = {name: np.asarray(values) for name, values in found.items()}
        if {"observation", "desired_goal"} <= seen.keys():
            whole = np.concatenate([seen["observation"], seen["desired_goal"]])
            own = seen["observation"]
            seen |= {"observations": whole, "proprioception": own[OF_THE_ARM] if len(own) == 25 else own}
        for name, values in seen.items():
            if values.dtype != np.uint8:
                seen[name] = values.astype(np.float32)
        if self.picture_size:
            seen["camera"] = self._render(env)
        return seen

    def _render(self, env: gymnasium.Env) -> np.ndarray:
        viewer = getattr(getattr(env.unwrapped, "mujoco_renderer", None), "viewer", None)
        remedy = "; if MuJoCo renders it, set MUJOCO_GL to egl, osmesa or glfw, whichever is installed"
        with users_code(f"{self.env_id} cannot render here", remedy):
            if viewer is not None:
                viewer.make_context_current()  # closing another viewer leaves no context, and every picture black
            frame = Image.fromarray(env.render())
            if frame.size[::-1] != tuple(self.picture_size):
                frame = frame.resize(self.picture_size[::-1])
            return np.asarray(frame)


def make_environment(env_id: str, horizon: int, picture_size: Sequence[int] | None) -> gymnasium.Env:
    """Make an environment by its gymnasium id, also "module:Name-v0", or by the user's "module:Class"."""
    spec: Any = env_id
    if ":" in env_id and env_id.rpartition(":")[2].isidentifier():
        kind = find_class("experiment.env", env_id)
        if picture_size and "rgb_array" not in getattr(kind, "metadata", {}).get("render_modes", []):
            raise UserError(f"{env_id} cannot render: its metadata['render_modes'] has no 'rgb_array'")
        spec = EnvSpec(env_id, kind)
    options: dict[str, Any] = {}
    if picture_size:
        os.environ.setdefault("MUJOCO_GL", "egl")
        options["render_mode"] = "rgb_array"
    if picture_size and env_id.startswith("Fetch"):
        options |= {"height": picture_size[0], "width": picture_size[1], "default_camera_config": CAMERA}
    return gymnasium.make(spec, max_episode_steps=horizon, disable_env_checker=True, **options)


def check_environment(index: Index) -> None:
    """Start an episode and take a step; raise if a policy would not find its observations there."""
    low, high = index.statistics.low, index.statistics.high
    arena = Arena(index.env_id, 1, index.rendered_size)
    try:
        seen, action_size = arena.try_out()
        _check_seen(index, seen, action_size)
        _check_seen(index, arena.try_step(((low + high) / 2).astype(np.float32)), action_size)
    finally:
        arena.close()


def _check_seen(index: Index, seen: Seen, action_size: int) -> None:
    env_id, cameras, statistics = index.env_id, index.entries.cameras, index.statistics
    names = used_names(seen, index.entries)
    missing = {*names, *cameras} - {*seen}
    if missing:
        raise UserError(
            f"{env_id} does not show {', '.join(sorted(missing))}, but {', '.join(seen)} (one array is called "
            f"observations; a dict names several): choose in observation.modalities.obs"
        )
    sizes = sum(seen[name].size for name in names), action_size
    if sizes != (len(statistics.mean), len(statistics.low)):
        raise UserError(
            f"{env_id} does not fit: it shows {sizes[0]} numbers and takes {action_size}; the demonstrations "
            f"show {len(statistics.mean)} and take {len(statistics.low)}"
        )
    for camera in cameras:
        shape = (*index.picture_sizes[camera], 3)
        if seen[camera].dtype != np.uint8 or seen[camera].shape != shape:
            raise UserError(
                f"{env_id} shows pictures {seen[camera].shape} in {seen[camera].dtype} as {camera}; the demonstrations "
                f"have {shape} in uint8"
            )
    with user_error(env_id, UserError):
        check_finite(seen, names)


def used_names(seen: Seen, entries: Entries) -> tuple[str, ...]:
    """Name the numbers that a policy observes; an environment's only array is its demonstrations' only entry."""
    if len(entries.numbers) == 1 and not {*seen} - {"observations", "camera"}:
        return ("observations",)
    return entries.numbers


def check_finite(seen: Seen, names: Sequence[str]) -> None:
    """Raise if observations are not finite: the policy's actions would be random."""
    for name in names:
        if not np.isfinite(seen[name]).all():
            raise UserError(f"{name} must be finite; the environment shows {seen[name].flat[:9]}")


class Random:
    """Uniform random actions, each number between its lowest and its highest value."""

    def __init__(self, low: Any = (-1,) * 4, high: Any = (1,) * 4) -> None:
        self.low, self.high = np.asarray(low), np.asarray(high)

    def begin(self, seeds: Sequence[int]) -> None:
        self.rngs = [np.random.default_rng(seed) for seed in seeds]

    def act(self, seen: Seen) -> np.ndarray:
        return np.stack([rng.uniform(self.low, self.high).astype(np.float32) for rng in self.rngs])


class Expert:
    """A script that knows what the numbers mean; it looks at the present only."""

    def __init__(self, env_id: str) -> None:
        self.script = EXPERTS[env_id]

    def begin(self, seeds: Sequence[int]) -> None: ...

    def act(self, seen: Seen) -> np.ndarray:
        actions = np.stack([self.script(observation) for observation in seen["observations"]])
        return actions.clip(-1, 1).astype(np.float32)


def reach(observation: np.ndarray) -> np.ndarray:
    return np.append(10 * (observation[-3:] - observation[:3]), 0.0)


def pick_and_place(observation: np.ndarray) -> np.ndarray:
    """Approach from above, so as not to push the block; close the fingers; and carry.

    The phases blend gradually: a policy could not tell on which side of a sharp threshold it is.
    """
    gripper, block, fingers, goal = observation[:3], observation[3:6], observation[9:11].sum(), observation[-3:]
    way = block - gripper
    distance, aside = np.linalg.norm(way), np.linalg.norm(way[:2])
    above = np.array([0, 0, np.clip(2 * (aside - 0.01), 0, 0.06)])
    held = np.clip((0.06 - fingers) / 0.008, 0, 1) * (distance < 0.025)  # the block is 0.05 wide
    velocity = 10 * ((1 - held) * (way + above) + held * (goal - block))
    return np.append(velocity, 100 * (distance - 0.02) - 2 * held)  # firmly, once the block is held


EXPERTS = {"FetchPickAndPlace-v4": pick_and_place, "FetchReach-v4": reach}


class Learned:
    """A policy that plans `action_horizon` actions at a time.

    Its starting noise comes from the episode's seed, so that an episode is the same, up to rounding, on any rank and
    beside any other episodes.
    """

    def __init__(self, policy: DiffusionPolicy, entries: Entries) -> None:
        self.policy, self.entries, self.device = policy, entries, policy.mean.device

    def begin(self, seeds: Sequence[int]) -> None:
        self.generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self.seen: deque[Seen] = deque(maxlen=self.policy.observation_horizon)
        self.plan: list[np.ndarray] = []

    def act(self, seen: Seen) -> np.ndarray:
        count = len(self.generators)
        names = used_names(seen, self.entries)
        check_finite(seen, names)
        numbers = [np.zeros((count, 0), np.float32)]  # a policy may see pictures alone
        numbers += [seen[name].reshape(count, -1) for name in names]
        used = {name: seen[name] for name in self.entries.cameras}
        used["observations"] = np.concatenate(numbers, axis=1)
        self.seen.extend([used] * (1 if self.seen else self.policy.observation_horizon))
        if not self.plan:
            shape = self.policy.prediction_horizon, self.policy.action_size
            noise = torch.stack([torch.randn(shape, generator=generator) for generator in self.generators])
            stacked = {name: np.stack([moment[name] for moment in self.seen], axis=1) for name in used}
            batch = {name: torch.from_numpy(values).to(self.device) for name, values in stacked.items()}
            self.plan = [*self.policy.act(batch, noise.to(self.device)).cpu().numpy().swapaxes(0, 1)]
        return self.plan.pop(0)


@dataclass(frozen=True)
class Score:
    """The outcome of episodes: whether each seed reached the goal."""

    by_seed: dict[int, bool]

    @property
    def successes(self) -> int:
        return sum(self.by_seed.values())

    @property
    def rate(self) -> float:
        return self.successes / len(self.by_seed)

    @property
    def error(self) -> float:
        """The standard error of the rate."""
        return math.sqrt(self.rate * (1 - self.rate) / len(self.by_seed))

    def __str__(self) -> str:
        return f"{self.rate:.2f} ± {self.error:.2f} ({self.successes} of {len(self.by_seed)})"

    def summary(self) -> dict[str, Any]:
        """Return the score for JSON."""
        by_seed = {str(seed): reached for seed, reached in self.by_seed.items()}
        about = {"success_rate": self.rate, "standard_error": self.error, "episodes": len(by_seed)}
        return about | {"by_seed": by_seed}

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(self.summary(), indent=4) + "\n")


@functools.cache  # making 25 environments takes as long as playing some episodes
def _arena(env_id: str, horizon: int, picture_size: tuple[int, int] | None) -> Arena:
    arena = Arena(env_id, horizon, picture_size)
    atexit.register(arena.close)  # renderers must close before Python exits
    return arena


def evaluate(
    env_id: str,
    player: Player,
    episodes: int,
    horizon: int,
    first_seed: int = UNSEEN,
    picture_size: tuple[int, int] | None = None,
) -> Score:
    """Play episodes with seeds from `first_seed`, each on one rank and counted once. Collective."""
    mine = range(ddpkit.get_rank(), episodes, ddpkit.get_world_size())
    reached = _arena(env_id, horizon, picture_size).play(player, [first_seed + number for number in mine])
    reached = ddpkit.gather_exact(reached, list(mine), episodes)
    return Score({first_seed + number: success for number, success in enumerate(reached)})
