"""Let players meet, and count the games on both sides."""

import math
from collections.abc import Mapping
from dataclasses import astuple, dataclass

import numpy as np

import ddpkit

from .game import SNAKES, Game
from .opponents import Player


@dataclass(frozen=True)
class Result:
    """Count what came of some games for the first player; the fields are sums, so that results can be added."""

    games: int = 0
    wins: int = 0
    draws: int = 0
    score: int = 0  # length gained by the end of a game, over all games
    other_score: int = 0  # of the second player

    def __add__(self, other: "Result") -> "Result":
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

    Games 2k and 2k + 1 begin alike, with `player` as team A in the one and as team B in the other. A game depends on
    the seed and its number alone: 100 games on one rank, and 100 of which 100 is the `first`, add up to 200 on one.
    """
    end = first + games
    sides = range((first + 1) // 2, (end + 1) // 2), range(first // 2, end // 2)
    result = Result()
    for side, numbers in enumerate(sides):
        if numbers:
            result += _play(player, other, side, Game(len(numbers), seed, first=numbers.start))
    return result


def play_on_all_ranks(player: Player, others: Mapping[str, Player], games: int, seed: int) -> dict[str, Result]:
    """Play games against each of the others, of which every rank takes a share; return results by name. Collective."""
    rank, ranks = ddpkit.get_rank(), ddpkit.get_world_size()
    first, end = games * rank // ranks, games * (rank + 1) // ranks
    mine = {
        name: astuple(play_games(player, other, end - first, seed=seed, first=first)) for name, other in others.items()
    }
    return {name: Result(*sums) for name, sums in ddpkit.all_reduce(mine).items()}


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
