"""Play this rank's share of the boards against an opponent, and remember what the three snakes of team A lived."""

from __future__ import annotations

from collections import Counter

import numpy as np
import torch

from .features import observe
from .game import SNAKES, START_LENGTH, Game
from .networks import Actor
from .opponents import Player
from .policy import explore
from .replay import Replay

TEAM = 0  # the side that learns; what it sees does not depend on the side


class Collector:
    """Hold boards and their replay.

    The boards start at different times of an episode, so that a batch holds all parts of one. A
    board's first, shorter episode is not counted.

    Args:
        boards: Numbers of this rank's boards among all, which has each play the same game on
            whatever rank.
        total: Number of all boards.
        seed: Of all boards.
        episode_length: In steps.
        transitions: Of single snakes that the replay holds.
    """

    def __init__(self, boards: range, total: int, seed: int, *, episode_length: int, transitions: int) -> None:
        self.game = Game(len(boards), seed, first=boards.start, episode_length=episode_length)
        self.game.boards.times[:] = np.array(boards) * episode_length // total
        self.replay = Replay(transitions // (3 * len(boards)), len(boards))
        self._whole = self.game.boards.times == 0
        self._actions = np.zeros((len(boards), SNAKES), np.uint8)

    @torch.no_grad()
    def play(self, actor: Actor, opponent: Player, epsilon: float) -> Counter:
        """Play one step on all boards.

        Args:
            actor: Chooses for team A.
            opponent: Plays team B.
            epsilon: Part of the moves of team A that is random.

        Returns:
            Sums over this rank's boards: `environment_steps`; `deaths` of the team in these steps;
            over the episodes that ended, `episodes`, `wins`, the rewards `snake_1` to `snake_3`,
            and the `opponent`'s reward.
        """
        game = self.game
        replay = self.replay
        device = next(actor.parameters()).device
        at = replay.next()
        observe(game.boards, TEAM, replay.seen[at])
        probabilities = actor(torch.from_numpy(replay.seen[at]).to(device)).cpu().numpy()
        explore(game.boards, TEAM, probabilities, epsilon, replay.ways[at], self._actions)
        opponent(game.boards, 1 - TEAM, self._actions)

        over = game.done.copy()  # at the moment before: these boards show their end now, and start anew
        game.step(self._actions)
        game.reset(over)
        game.done[over] = False
        game.died[over] = False
        replay.moved[at] = ~over
        replay.died[at] = game.died[:, :3]
        replay.rewards[at] = game.rewards[:, :3]

        ended = game.done & self._whole
        self._whole |= over
        return self._sums(ended, ~over)

    def _sums(self, ended: np.ndarray, moved: np.ndarray) -> Counter:
        """Add up what `play()` returns, given the boards on which an episode ended, and those that moved."""
        gains = self.game.boards.lengths[ended].astype(np.int64) - START_LENGTH
        ours = gains[:, :3].sum(1)
        theirs = gains[:, 3:].sum(1)
        arrays = {
            "episodes": ended,
            "environment_steps": moved,
            "deaths": self.game.died[:, :3],
            "wins": ours > theirs,
            "snake_1": gains[:, 0],
            "snake_2": gains[:, 1],
            "snake_3": gains[:, 2],
            "opponent": theirs,
        }
        return Counter({name: int(array.sum()) for name, array in arrays.items()})
