"""Plays this rank's share of the boards against an opponent, and remembers what the three snakes of team A lived."""

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
    """Boards and their replay.

    The boards start at different times of an episode, so that a batch holds all parts of one. A board's first, shorter
    episode is not counted.

    Args:
        boards: Numbers of this rank's boards among all, which has each play the same game on whatever rank.
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
        """Plays one step on all boards.

        Returns:
            Sums over this rank's boards: `environment_steps`; `deaths` of the team in these steps; over the episodes
            that ended, `episodes`, `wins`, the rewards `snake_1` to `snake_3`, and the `opponent`'s reward.
        """
        game, replay = self.game, self.replay
        at = replay.next()
        observe(game.boards, TEAM, replay.seen[at])
        seen = torch.from_numpy(replay.seen[at]).to(next(actor.parameters()).device)
        explore(game.boards, TEAM, actor(seen).cpu().numpy(), epsilon, replay.ways[at], self._actions)
        opponent(game.boards, 1 - TEAM, self._actions)

        over = game.done.copy()  # at the moment before: these boards show their end now, and start anew
        game.step(self._actions)
        game.reset(over)
        game.done[over], game.died[over] = False, False
        replay.moved[at] = ~over
        replay.died[at] = game.died[:, :3]
        replay.rewards[at] = game.rewards[:, :3]

        ended = game.done & self._whole
        self._whole |= over
        gains = game.boards.lengths[ended].astype(np.int64) - START_LENGTH
        ours, theirs = gains[:, :3].sum(1), gains[:, 3:].sum(1)
        sums = {f"snake_{k + 1}": gains[:, k] for k in range(3)} | {"opponent": theirs, "wins": ours > theirs}
        sums |= {"episodes": ended, "environment_steps": ~over, "deaths": game.died[:, :3]}
        return Counter({name: int(values.sum()) for name, values in sums.items()})
