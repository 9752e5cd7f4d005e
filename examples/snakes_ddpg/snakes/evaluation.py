"""Let players meet: games counted on both sides, and the league of those whom the agent meets in training."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np

from .ddpg import Actor
from .game import SNAKES, Game
from .opponents import Player, get
from .search import Policy

BOARDS = 256  # games played side by side
DECAY = 0.9  # what a result counts a round later, in the league
FLOOR = 0.02  # so that nobody in it is forgotten


@dataclass(frozen=True)
class Result:
    """Count what came of some games for the first player; the fields are sums, so that results can be added.

    The ranks' results become one by `Result(*ddpkit.all_reduce(dataclasses.astuple(result)))`.
    """

    games: int = 0
    wins: int = 0
    draws: int = 0
    score: int = 0  # length gained by the end of a game, over all games
    other_score: int = 0  # of the second player

    def __add__(self, other: Result) -> Result:
        return Result(*(mine + yours for mine, yours in zip(astuple(self), astuple(other), strict=True)))

    def __str__(self) -> str:
        score, other_score = (total / max(self.games, 1) for total in (self.score, self.other_score))
        return (
            f"{self.wins} of {self.games} games won, {self.draws} drawn: win rate {self.win_rate:.3f} "
            f"+- {self.standard_error:.3f}, score {score:.1f} : {other_score:.1f}"
        )

    @property
    def losses(self) -> int:
        return self.games - self.wins - self.draws

    @property
    def win_rate(self) -> float:
        """Divide games won by games; a draw is not won."""
        return self.wins / max(self.games, 1)

    @property
    def standard_error(self) -> float:
        """Estimate the error of the win rate p: sqrt(p (1 - p) / games), as if games were independent."""
        return math.sqrt(self.win_rate * (1 - self.win_rate) / max(self.games, 1))

    @property
    def lead(self) -> float:
        """Subtract the second player's mean score per game from the first's."""
        return (self.score - self.other_score) / max(self.games, 1)


def play_games(player: Player, other: Player, games: int, *, seed: int = 0, first: int = 0) -> Result:
    """Play whole games of 200 steps; the larger score at the end wins.

    Games 2k and 2k + 1 begin alike, with `player` as team A in the one and as team B in the other.
    A game depends on the seed and its number alone: games 0 to 99 on one rank and 100 to 199 on
    another add up to 200 on one.

    Args:
        player: The first player, whose wins the result counts.
        other: Whom it meets.
        games: Number of games.
        seed: Of all games.
        first: Number of the first game.
    """
    end = first + games
    sides = range((first + 1) // 2, (end + 1) // 2), range(first // 2, end // 2)
    result = Result()
    for side, numbers in enumerate(sides):
        for begin in numbers[::BOARDS]:
            count = min(BOARDS, numbers.stop - begin)
            result += _play(player, other, side, Game(count, seed, first=begin))
    return result


def _play(player: Player, other: Player, side: int, game: Game) -> Result:
    """Play every board to its end, `player` as team `side`."""
    count = len(game.done)
    actions = np.zeros((count, SNAKES), np.uint8)
    scores = np.zeros((count, 2), np.int64)
    playing = np.ones(count, np.bool_)
    while playing.any():
        player(game.boards, side, actions)
        other(game.boards, 1 - side, actions)
        game.step(actions)
        ended = playing & game.done
        scores[ended] = game.scores()[ended]
        playing &= ~ended
        game.reset(game.done)  # a game that ended early must not be played on
    mine, theirs = scores[:, side], scores[:, 1 - side]
    wins, draws = int((mine > theirs).sum()), int((mine == theirs).sum())
    return Result(count, wins, draws, int(mine.sum()), int(theirs.sum()))


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
