"""Turn an actor into moves: the way with the greatest probability to play well, drawn ways to learn."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numba import njit

from .features import DIRECTION, FEATURES, WAYS, observe
from .game import Boards, draw
from .networks import Actor, load_actor


class Policy:
    """Play as one team, by each snake's most probable way: a player like those in `opponents.py`."""

    def __init__(self, actor: Actor) -> None:
        self.actor = actor
        self.device = next(actor.parameters()).device

    @torch.no_grad()
    def __call__(self, boards: Boards, team: int, actions: np.ndarray) -> None:
        ways = self.actor(self.look(boards, team)).argmax(-1).cpu().numpy()
        snakes = slice(3 * team, 3 * team + 3)
        actions[:, snakes] = DIRECTION[boards.headings[:, snakes], ways]

    def look(self, boards: Boards, team: int) -> torch.Tensor:
        """See what the actor takes: (n, 3, FEATURES), on its device."""
        seen = np.empty((len(boards.times), 3, FEATURES), np.float32)
        observe(boards, team, seen)
        return torch.from_numpy(seen).to(self.device)


def load_policy(path: Path) -> Policy:
    """Load the player in a file `actor_*.pth`.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it does not hold an actor that sees what `features.py` shows.
    """
    return Policy(load_actor(path))


@njit(cache=True, nogil=True)
def explore(boards, team, probabilities, epsilon, ways, actions):
    """Draw a way for each snake of a team, with probability `epsilon` any of the three alike.

    Args:
        boards: The boards, n.
        team: 0 or 1.
        probabilities: (n, 3, 3) float32, of each snake's ways.
        epsilon: From 0 to 1.
        ways: (n, 3) uint8, filled with the ways drawn, from the boards' own streams.
        actions: (n, 6) uint8, of which the team's columns are filled.
    """
    for b in range(len(ways)):
        for k in range(3):
            way = draw(boards, b, WAYS)
            if draw(boards, b, 1 << 15) >= epsilon * (1 << 15):
                left = draw(boards, b, 1 << 15) / (1 << 15)
                way = 0
                while way < WAYS - 1 and left >= probabilities[b, k, way]:
                    left -= probabilities[b, k, way]
                    way += 1
            ways[b, k] = way
            actions[b, 3 * team + k] = DIRECTION[boards.headings[b, 3 * team + k], way]
