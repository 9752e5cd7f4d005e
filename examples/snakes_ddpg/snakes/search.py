"""Play with a few steps of search: change the ways that the actor prefers where what follows is better."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from .features import DIRECTION, WAYS
from .game import SNAKES, Boards, foresee
from .networks import Actor, Critic, load_actor, load_weights
from .policy import Policy

DEPTH = 4  # steps that it looks ahead
GAMMA = 0.97  # discount per step, as in training
LAMBDA = 0.5  # weight of what follows a step, against what the critic expects of it
DOUBT = 0.1  # how probable it is that a rival takes its second way, for each of the three
MARGIN = 0.15  # by how much another way has to be better than the actor's


class Search(Policy):
    """Play as one team: each snake's most probable way, or another one after which the team stands better by a margin.

    Each of the team in turn tries its two other ways, and all six snakes then go on as the actor
    prefers. The steps are played by the rules, but for new beans: nobody knows where they will be.
    They are worth the team's gains minus the rivals', and what the critic expects after each, as in
    TD(lambda).

    Args:
        actor: Prefers ways.
        critic: Values them; trained with the actor.
        depth: Steps to look ahead.

    Raises:
        ValueError: If the depth is below 1.
    """

    def __init__(self, actor: Actor, critic: Critic, depth: int = DEPTH) -> None:
        super().__init__(actor)
        if depth < 1:
            raise ValueError(f"a search looks at least one step ahead, not {depth}")
        self.critic = critic
        self.depth = depth

    @torch.no_grad()
    def __call__(self, boards: Boards, team: int, actions: np.ndarray) -> None:
        ranks = np.concatenate([self.rank(self.look(boards, side)) for side in (0, 1)], axis=1)
        ways = ranks[..., 0].copy()
        second = ranks[..., 1]
        standing = self.value(boards, team, ways, second)
        for s in range(3 * team, 3 * team + 3):
            preferred = ways[:, s].copy()
            bar = standing + MARGIN
            for turn in range(1, WAYS):
                other = ways.copy()
                other[:, s] = (preferred + turn) % WAYS
                value = self.value(boards, team, other, second)
                better = value > bar
                ways[better, s] = other[better, s]
                bar[better] = value[better]
                standing[better] = value[better]
        snakes = slice(3 * team, 3 * team + 3)
        actions[:, snakes] = DIRECTION[boards.headings[:, snakes], ways[:, snakes]]

    def rank(self, seen: torch.Tensor) -> np.ndarray:
        """Sort the ways of snakes, the most probable first: (n, 3, WAYS)."""
        return self.actor.layers(seen).argsort(stable=True, dim=-1, descending=True).cpu().numpy()

    def value(self, boards: Boards, team: int, ways: np.ndarray, second: np.ndarray) -> np.ndarray:
        """Value the boards for a team if all snakes go their ways, (n, 6), or one rival its second way: (n,)."""
        value = (1 - 3 * DOUBT) * self.play_on(boards, team, ways)
        for rival in range(3 - 3 * team, 6 - 3 * team):
            other = ways.copy()
            other[:, rival] = second[:, rival]
            value += DOUBT * self.play_on(boards, team, other)
        return value

    def play_on(self, boards: Boards, team: int, ways: np.ndarray) -> np.ndarray:
        """Value the boards for a team if all snakes go these ways, (n, 6), and then as the actor prefers: (n,)."""
        boards = Boards(*(array.copy() for array in boards))
        rewards = np.zeros((len(ways), SNAKES), np.int16)
        died = np.zeros((len(ways), SNAKES), np.bool_)
        total = np.zeros(len(ways))
        weight = 1.0
        for step in range(self.depth):
            foresee(boards, DIRECTION[boards.headings, ways], rewards, died)
            gains = rewards.reshape(-1, 2, 3).sum(2)
            lead = gains[:, team] - gains[:, 1 - team]
            sides = [self.look(boards, side) for side in (0, 1)]
            expected = (self.actor(sides[team]) * self.critic(sides[team])).sum(-1).mean(-1).cpu().numpy()
            is_last = step == self.depth - 1
            total += weight * (lead + GAMMA * (1.0 if is_last else 1 - LAMBDA) * expected)
            weight *= GAMMA * LAMBDA
            ways = np.concatenate([self.rank(seen)[..., 0] for seen in sides], axis=1)
        return total


def load_search(path: Path, depth: int = DEPTH) -> Search:
    """Load the player in a file `actor_*.pth` with the critic beside it.

    Raises:
        FileNotFoundError: If there is no such file, or no critic.
        ValueError: If they do not hold networks that see what `features.py` shows.
    """
    actor = load_actor(path)
    critic = Critic(hidden=len(actor.layers[0].bias))
    load_weights(critic, path.with_name(path.name.replace("actor", "critic")))
    return Search(actor, critic, depth)
