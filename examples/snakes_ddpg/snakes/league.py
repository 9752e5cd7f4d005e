"""Choose the opponents of training: the scripted ladder and past selves of the agent, each as often as it wins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import numpy as np

from .networks import Actor
from .opponents import Player, get
from .policy import Policy

DECAY = 0.9  # what a result counts a round later
FLOOR = 0.02  # so that nobody is forgotten


class League:
    """Hold the players, alike on every rank: the ladder's, then past selves; a new one replaces the oldest.

    Args:
        ladder: Names of scripted players.
        selves: How many past selves it keeps; together they weigh as one player.
    """

    def __init__(self, ladder: Sequence[str], selves: int) -> None:
        self.names = [*ladder, *(f"self {number}" for number in range(selves))]
        self.players: list[Player] = [get(name) for name in ladder]
        self.ladder = len(ladder)
        self.selves = selves
        self.added = 0  # selves so far
        self.games = np.full(len(self.names), 2.0)
        self.wins = np.full(len(self.names), 1.0)  # of the agent

    def add(self, actor: Actor) -> None:
        """Add the agent as it is now."""
        place = self.ladder + self.added % self.selves
        self.players[place : place + 1] = [Policy(deepcopy(actor).requires_grad_(False))]
        self.games[place] = 2.0
        self.wins[place] = 1.0
        self.added += 1

    def note(self, sums: Mapping[str, int]) -> None:
        """Take in the results of a round, of all ranks, as `Collector.play()` names them."""
        for place in range(len(self.players)):
            self.games[place] = DECAY * self.games[place] + sums[f"met_{place}"]
            self.wins[place] = DECAY * self.wins[place] + sums[f"beaten_{place}"]

    def shares(self) -> np.ndarray:
        """Find the part of the games to play against each player: as often as it is not beaten."""
        count = len(self.players)
        shares = 1 - (self.wins / self.games)[:count] + FLOOR
        shares[self.ladder :] /= max(1, count - self.ladder)
        return shares / shares.sum()

    def state_dict(self) -> dict[str, Any]:
        """Return all but the scripted players, for a checkpoint."""
        return {
            "selves": [player.actor.state_dict() for player in self.players[self.ladder :]],
            "added": self.added,
            "games": self.games.tolist(),
            "wins": self.wins.tolist(),
        }

    def load_state_dict(self, state: Mapping[str, Any], actor: Actor) -> None:
        """Load what `state_dict()` returned; `actor` is any of the same shape."""
        del self.players[self.ladder :]
        self.added = 0
        for weights in state["selves"]:
            self.add(actor)
            self.players[-1].actor.load_state_dict(weights)
        self.added = state["added"]
        self.games[:] = state["games"]
        self.wins[:] = state["wins"]
