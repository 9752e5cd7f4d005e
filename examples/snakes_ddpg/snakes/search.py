"""Play with one step of search: change the ways that the actor prefers where the critic finds what follows better."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from .features import DIRECTION, WAYS
from .game import SNAKES, Boards, foresee
from .networks import Actor, Critic, load_actor, load_weights
from .policy import Policy

GAMMA = 0.97  # discount of what the critic says of the next step, as in training
MARGIN = 0.15  # by how much another way has to be better than the actor's


class Search(Policy):
    """Play as one team: each snake's most probable way, or another one after which the team stands better by a margin.

    All six snakes are expected to go as the actor prefers. Then each of the team in turn tries its
    two other ways. A step is worth the team's gain minus the rivals', and what the critic expects
    of the boards after it; new beans do not count, as nobody knows where they will be.
    """

    def __init__(self, actor: Actor, critic: Critic) -> None:
        super().__init__(actor)
        self.critic = critic

    @torch.no_grad()
    def __call__(self, boards: Boards, team: int, actions: np.ndarray) -> None:
        ways = np.concatenate([self.prefer(boards, side) for side in (0, 1)], axis=1)
        standing = self.value(boards, team, ways)
        for s in range(3 * team, 3 * team + 3):
            preferred = ways[:, s].copy()
            bar = standing + MARGIN
            for turn in range(1, WAYS):
                other = ways.copy()
                other[:, s] = (preferred + turn) % WAYS
                value = self.value(boards, team, other)
                better = value > bar
                ways[better, s] = other[better, s]
                bar[better] = value[better]
                standing[better] = value[better]
        snakes = slice(3 * team, 3 * team + 3)
        actions[:, snakes] = DIRECTION[boards.headings[:, snakes], ways[:, snakes]]

    def prefer(self, boards: Boards, team: int) -> np.ndarray:
        """Find the most probable way of each snake of a team: (n, 3)."""
        return self.actor(self.look(boards, team)).argmax(-1).cpu().numpy()

    def value(self, boards: Boards, team: int, ways: np.ndarray) -> np.ndarray:
        """Value the boards for a team once all snakes have gone their ways, (n, 6): (n,)."""
        after = Boards(*(array.copy() for array in boards))
        actions = DIRECTION[boards.headings, ways]
        rewards = np.zeros((len(ways), SNAKES), np.int16)
        died = np.zeros((len(ways), SNAKES), np.bool_)
        foresee(after, actions, rewards, died)
        seen = self.look(after, team)
        expected = (self.actor(seen) * self.critic(seen)).sum(-1).mean(-1)
        gains = rewards.reshape(-1, 2, 3).sum(2)
        return gains[:, team] - gains[:, 1 - team] + GAMMA * expected.cpu().numpy()


def load_search(path: Path) -> Search:
    """Load the player in a file `actor_*.pth` with the critic beside it.

    Raises:
        FileNotFoundError: If there is no such file, or no critic.
        ValueError: If they do not hold networks that see what `features.py` shows.
    """
    actor = load_actor(path)
    critic = Critic(hidden=len(actor.layers[0].bias))
    load_weights(critic, path.with_name(path.name.replace("actor", "critic")))
    return Search(actor, critic)
