"""The Fetch robot's environments without a screen, scripted experts for them, and episodes played in lock-step.

gymnasium-robotics' FetchPickAndPlace-v4: an arm lifts a block to a place on the table or above it; FetchReach-v4: it
moves its gripper to a place. An action is a velocity (x, y, z) of the gripper and of its fingers, each within [-1, 1].
An observation here is one vector, the environment's own with the goal at its end.
"""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from typing import Any, Protocol

import gymnasium
import numpy as np
import torch
from tqdm import trange

import ddpkit

from .policy import DiffusionPolicy

with redirect_stderr(io.StringIO()):  # it prints a note on environments that are not used here
    import gymnasium_robotics

gymnasium.register_envs(gymnasium_robotics)
AT_ONCE = 25  # environments in lock-step; more would only take memory
Watch = Callable[[gymnasium.Env, np.ndarray], None]  # the environment, and what was observed in it


class Player(Protocol):
    """Plays several episodes at once."""

    def begin(self, seeds: Sequence[int]) -> None:
        """New episodes begin, with these seeds."""

    def act(self, observations: np.ndarray) -> np.ndarray:
        """Actions (episodes, numbers) for observations (episodes, numbers)."""


class Arena:
    """Environments in which episodes are played in lock-step.

    Args:
        env_id: Name of the environment.
        horizon: Steps in an episode.
        **options: Of the environment, for example `render_mode`.
    """

    def __init__(self, env_id: str, horizon: int, **options: Any) -> None:
        self.env_id, self.horizon, self.options = env_id, horizon, options
        self.envs: list[gymnasium.Env] = []

    def play(self, player: Player, seeds: Sequence[int], watch: Watch | None = None) -> list[bool]:
        """Plays one episode for each seed; it depends on nothing but the seed and the player.

        Args:
            player: Who acts.
            seeds: Of the episodes.
            watch: Is shown what happens, at each step of each episode.

        Returns:
            Whether the goal is reached at the end of each episode; having passed it on the way is not enough.
        """
        while len(self.envs) < min(AT_ONCE, len(seeds)):
            env = gymnasium.make(self.env_id, max_episode_steps=self.horizon, disable_env_checker=True, **self.options)
            self.envs.append(env)
        successes: list[bool] = []
        no_bar = None if ddpkit.is_main_process() else True  # None: a bar if there is a terminal
        for start in trange(0, len(seeds), AT_ONCE, desc="episodes", unit=f" x {AT_ONCE}", leave=False, disable=no_bar):
            wave = seeds[start : start + AT_ONCE]
            observations = np.stack(
                [_flat(env.reset(seed=seed)[0]) for env, seed in zip(self.envs, wave, strict=False)]
            )
            player.begin(wave)
            for _ in range(self.horizon):
                actions, reached = player.act(observations), []
                for number, (env, action) in enumerate(zip(self.envs, actions, strict=False)):
                    if watch:
                        watch(env, observations[number])
                    found, _, _, _, info = env.step(action)
                    observations[number] = _flat(found)
                    reached.append(bool(info["is_success"]))
            successes += reached
        return successes


def _flat(observation: dict[str, np.ndarray]) -> np.ndarray:
    return np.concatenate([observation["observation"], observation["desired_goal"]]).astype(np.float32)


class Random:
    """Uniform actions."""

    def begin(self, seeds: Sequence[int]) -> None:
        self.rngs = [np.random.default_rng(seed) for seed in seeds]

    def act(self, observations: np.ndarray) -> np.ndarray:
        return np.stack([rng.uniform(-1, 1, 4).astype(np.float32) for rng in self.rngs])


class Expert:
    """Scripted: it knows what the numbers mean, and looks at the present moment only."""

    def __init__(self, env_id: str) -> None:
        if env_id not in EXPERTS:
            raise ValueError(f"there is an expert for {' and '.join(EXPERTS)}, not for {env_id}")
        self.script = EXPERTS[env_id]

    def begin(self, seeds: Sequence[int]) -> None: ...

    def act(self, observations: np.ndarray) -> np.ndarray:
        return np.stack([self.script(observation) for observation in observations]).clip(-1, 1).astype(np.float32)


def reach(observation: np.ndarray) -> np.ndarray:
    return np.append(10 * (observation[-3:] - observation[:3]), 0.0)


def pick_and_place(observation: np.ndarray) -> np.ndarray:
    """Comes from above, as into a funnel, or it would push the block; closes its fingers; and carries.

    It turns from one to the next gradually: a policy could not tell on which side of a sharp threshold it is.
    """
    gripper, block, fingers, goal = observation[:3], observation[3:6], observation[9:11].sum(), observation[-3:]
    way = block - gripper
    distance, aside = np.linalg.norm(way), np.linalg.norm(way[:2])
    above = np.array([0, 0, np.clip(2 * (aside - 0.01), 0, 0.06)])
    held = np.clip((0.06 - fingers) / 0.008, 0, 1) * (distance < 0.025)  # the block is 0.05 wide
    velocity = 10 * ((1 - held) * (way + above) + held * (goal - block))
    return np.append(velocity, 100 * (distance - 0.02) - 2 * held)  # firmly, once it is held


EXPERTS = {"FetchPickAndPlace-v4": pick_and_place, "FetchReach-v4": reach}


class Learned:
    """A policy, which acts `action_horizon` steps by what it saw at the first of them.

    The noise that it begins with comes from the episode's seed: on whatever rank, in whatever company, an episode is
    the same, but for rounding.
    """

    def __init__(self, policy: DiffusionPolicy) -> None:
        self.policy, self.device = policy, policy.mean.device

    def begin(self, seeds: Sequence[int]) -> None:
        self.generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self.seen: deque[np.ndarray] = deque(maxlen=self.policy.observation_horizon)
        self.plan: list[np.ndarray] = []

    def act(self, observations: np.ndarray) -> np.ndarray:
        self.seen.extend([observations.copy()] * (1 if self.seen else self.policy.observation_horizon))
        if not self.plan:
            shape = self.policy.prediction_horizon, self.policy.action_size
            noise = torch.stack([torch.randn(shape, generator=generator) for generator in self.generators])
            seen = torch.from_numpy(np.stack(self.seen, axis=1))
            self.plan = [*self.policy.act(seen.to(self.device), noise.to(self.device)).cpu().numpy().swapaxes(0, 1)]
        return self.plan.pop(0)
