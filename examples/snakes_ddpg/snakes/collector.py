"""Play this rank's share of the boards against an opponent, and remember what the three snakes of team A lived."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from numba import njit

from .features import observe
from .game import SNAKES, START_LENGTH, Boards, Game, draw
from .networks import Actor
from .opponents import Player
from .policy import explore
from .replay import Replay

TEAM = 0  # the side that learns; what it sees does not depend on the side
NOBODY = np.iinfo(np.int64).max  # an opponent's number that no player has


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
        reward: "own": a snake is paid for its own length, and its death ends its life; "team": all
            three are paid for what the team gains on the other, through deaths, too.
    """

    def __init__(
        self,
        boards: range,
        total: int,
        seed: int,
        *,
        episode_length: int,
        transitions: int,
        reward: str = "team",
    ) -> None:
        self.game = Game(len(boards), seed, first=boards.start, episode_length=episode_length)
        self.game.boards.times[:] = np.array(boards) * episode_length // total
        self.replay = Replay(transitions // (3 * len(boards)), len(boards))
        self._whole = self.game.boards.times == 0
        self._opponents = np.full(len(boards), NOBODY)
        self._by_team = reward == "team"
        self._actions = np.zeros((len(boards), SNAKES), np.uint8)

    @torch.no_grad()
    def play(self, actor: Actor, players: Sequence[Player], shares: np.ndarray, epsilon: float) -> Counter:
        """Play one step on all boards.

        Args:
            actor: Chooses for team A.
            players: Play team B, one of them on each board for an episode.
            shares: Part of the episodes that each of them plays.
            epsilon: Part of the moves of team A that is random.

        Returns:
            Sums over this rank's boards: `environment_steps`; `deaths` of the team in these steps;
            over the episodes that ended, `episodes`, `wins`, the rewards `snake_1` to `snake_3`,
            the `opponent`'s reward, and for each player, by its number, `met_0` and `beaten_0`.
        """
        game = self.game
        replay = self.replay
        limits = np.cumsum(shares)
        without = self._opponents >= len(players)  # at first, and where the players have changed in mid-episode
        if without.any():
            choose(game.boards, without, limits, self._opponents)
        device = next(actor.parameters()).device
        at = replay.next()
        observe(game.boards, TEAM, replay.seen[at])
        probabilities = actor(torch.from_numpy(replay.seen[at]).to(device)).cpu().numpy()
        explore(game.boards, TEAM, probabilities, epsilon, replay.ways[at], self._actions)
        self._ask(players)

        over = game.done.copy()  # at the moment before: these boards show their end now, and start anew
        game.step(self._actions)
        game.reset(over)
        choose(game.boards, over, limits, self._opponents)
        game.done[over] = False
        game.died[over] = False
        replay.moved[at] = ~over
        if self._by_team:
            replay.rewards[at] = (game.rewards[:, :3].sum(1) - game.rewards[:, 3:].sum(1))[:, None]
        else:
            replay.rewards[at] = game.rewards[:, :3]
            replay.died[at] = game.died[:, :3]

        ended = game.done & self._whole
        self._whole |= over
        return self._sums(ended, ~over, len(players))

    def _ask(self, players: Sequence[Player]) -> None:
        """Have each player move on its boards."""
        boards = self.game.boards
        for place, player in enumerate(players):
            which = np.flatnonzero(self._opponents == place)
            if len(which) == len(self._opponents):
                player(boards, 1 - TEAM, self._actions)
            elif len(which):
                some = Boards(*(array[which] for array in boards))
                actions = np.empty((len(which), SNAKES), np.uint8)
                player(some, 1 - TEAM, actions)
                self._actions[which, 3:] = actions[:, 3:]
                boards.streams[which] = some.streams

    def _sums(self, ended: np.ndarray, moved: np.ndarray, players: int) -> Counter:
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
        for place in range(players):
            met = self._opponents[ended] == place
            arrays[f"met_{place}"] = met
            arrays[f"beaten_{place}"] = met & (ours > theirs)
        return Counter({name: int(array.sum()) for name, array in arrays.items()})


@njit(cache=True, nogil=True)
def choose(boards, which, limits, opponents):
    """Draw who plays the next episode, from the boards' own streams.

    Args:
        boards: The boards, n.
        which: (n,) bool, those on which an episode begins.
        limits: (k,) float64, the players' shares added up.
        opponents: (n,) int64, filled with the numbers of the players, where an episode begins.
    """
    for b in range(len(which)):
        if which[b]:
            at = limits[-1] * draw(boards, b, 1 << 15) / (1 << 15)
            opponents[b] = 0
            while at >= limits[opponents[b]]:
                opponents[b] += 1
