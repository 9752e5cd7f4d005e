"""How often a player reaches the goal, on seeds that no demonstration was made with, split over the ranks."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import ddpkit

from .environments import Arena, Player

UNSEEN = 1_000_000  # the first of these seeds


@dataclass(frozen=True)
class Score:
    """Successes in a number of episodes."""

    successes: int
    episodes: int

    @property
    def rate(self) -> float:
        return self.successes / self.episodes

    @property
    def error(self) -> float:
        """The rate's standard error."""
        return math.sqrt(self.rate * (1 - self.rate) / self.episodes)

    def __str__(self) -> str:
        return f"{self.rate:.2f} ± {self.error:.2f} ({self.successes} of {self.episodes})"


@functools.cache  # making 25 environments takes as long as playing some episodes
def _arena(env_id: str, horizon: int) -> Arena:
    return Arena(env_id, horizon)


def evaluate(env_id: str, player: Player, episodes: int, horizon: int, first_seed: int = UNSEEN) -> Score:
    """Plays episodes of which every rank has a share; each is counted once. Collective.

    Args:
        env_id: The environment.
        player: Who acts, the same on every rank.
        episodes: How many, over all ranks.
        horizon: Steps in an episode.
        first_seed: Of the first episode; the next one has the next.
    """
    rank, world_size = ddpkit.get_rank(), ddpkit.get_world_size()
    mine = range(rank, episodes, world_size)
    reached = _arena(env_id, horizon).play(player, [first_seed + number for number in mine])
    return Score(sum(ddpkit.gather_exact(reached, list(mine), episodes)), episodes)
