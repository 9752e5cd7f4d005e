"""How often a player reaches the goal, on seeds that no demonstration was made with, split over the ranks."""

from __future__ import annotations

import atexit
import functools
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ddpkit

from .environments import Arena, Player

UNSEEN = 1_000_000  # the first of these seeds


@dataclass(frozen=True)
class Score:
    """Who has reached the goal: an episode's seed, and whether it did."""

    by_seed: dict[int, bool]

    @property
    def episodes(self) -> int:
        return len(self.by_seed)

    @property
    def successes(self) -> int:
        return sum(self.by_seed.values())

    @property
    def rate(self) -> float:
        return self.successes / self.episodes

    @property
    def error(self) -> float:
        """The rate's standard error."""
        return math.sqrt(self.rate * (1 - self.rate) / self.episodes)

    def __str__(self) -> str:
        return f"{self.rate:.2f} ± {self.error:.2f} ({self.successes} of {self.episodes})"

    def summary(self) -> dict[str, Any]:
        """Return the score as JSON has it."""
        return {
            "success_rate": self.rate,
            "standard_error": self.error,
            "episodes": self.episodes,
            "by_seed": {str(seed): reached for seed, reached in self.by_seed.items()},
        }

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(self.summary(), indent=4) + "\n")


@functools.cache  # making 25 environments takes as long as playing some episodes
def _arena(env_id: str, horizon: int, picture_size: tuple[int, int] | None) -> Arena:
    arena = Arena(env_id, horizon, picture_size)
    atexit.register(arena.close)  # what renders must end before Python does
    return arena


def evaluate(
    env_id: str,
    player: Player,
    episodes: int,
    horizon: int,
    first_seed: int = UNSEEN,
    picture_size: tuple[int, int] | None = None,
) -> Score:
    """Play episodes of which every rank has a share; each is counted once. Collective.

    Args:
        env_id: The environment.
        player: Who acts, the same on every rank.
        episodes: How many, over all ranks.
        horizon: Steps in an episode.
        first_seed: Of the first episode; the next one has the next.
        picture_size: Height and width of the camera's pictures, if the player looks at them.
    """
    rank, world_size = ddpkit.get_rank(), ddpkit.get_world_size()
    mine = range(rank, episodes, world_size)
    reached = _arena(env_id, horizon, picture_size).play(player, [first_seed + number for number in mine])
    reached = ddpkit.gather_exact(reached, list(mine), episodes)
    return Score({first_seed + number: success for number, success in enumerate(reached)})
