"""Let two players meet in whole games, on both sides, and count."""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass

import numpy as np

from .game import SNAKES, Game
from .opponents import Player


@dataclass(frozen=True)
class Result:
    """Count what came of some games for the first player; the fields are sums, so that results can be added.

    The ranks' results become one by `Result(*ddpkit.all_reduce(dataclasses.astuple(result)))`.
    """

    games: int = 0
    wins: int = 0
    draws: int = 0
    games_as_a: int = 0  # those of the games in which it was team A
    wins_as_a: int = 0
    score: int = 0  # length gained by the end of a game, over all games
    deaths: int = 0
    other_score: int = 0  # of the second player
    other_deaths: int = 0

    def __add__(self, other: Result) -> Result:
        return Result(*(mine + yours for mine, yours in zip(astuple(self), astuple(other), strict=True)))

    def __str__(self) -> str:
        return (
            f"{self.wins} of {self.games} games won, {self.draws} drawn: win rate {self.win_rate:.3f} "
            f"+- {self.standard_error:.3f} (as A {self.win_rate_as_a:.3f}, as B {self.win_rate_as_b:.3f}), "
            f"score {self.scores[0]:.1f} : {self.scores[1]:.1f}, "
            f"deaths {self.deaths_per_game[0]:.1f} : {self.deaths_per_game[1]:.1f}"
        )

    @property
    def losses(self) -> int:
        return self.games - self.wins - self.draws

    @property
    def win_rate(self) -> float:
        """Divide games won by games; a draw is not won. Not a number if there were no games, as all other means."""
        return _mean(self.wins, self.games)

    @property
    def standard_error(self) -> float:
        """Estimate the error of the win rate p: sqrt(p (1 - p) / games), as if games were independent."""
        return math.sqrt(self.win_rate * (1 - self.win_rate) / max(self.games, 1))

    @property
    def win_rate_as_a(self) -> float:
        return _mean(self.wins_as_a, self.games_as_a)

    @property
    def win_rate_as_b(self) -> float:
        return _mean(self.wins - self.wins_as_a, self.games - self.games_as_a)

    @property
    def scores(self) -> tuple[float, float]:
        """Average the score per game of the first and of the second player."""
        return _mean(self.score, self.games), _mean(self.other_score, self.games)

    @property
    def lead(self) -> float:
        """Subtract the second player's mean score per game from the first's."""
        return self.scores[0] - self.scores[1]

    @property
    def deaths_per_game(self) -> tuple[float, float]:
        """Average the deaths of the first and of the second player's three snakes together."""
        return _mean(self.deaths, self.games), _mean(self.other_deaths, self.games)


def play_games(
    player: Player,
    other: Player,
    games: int,
    *,
    seed: int = 0,
    first: int = 0,
    boards: int = 256,
    both_sides: bool = True,
) -> Result:
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
        boards: Games played side by side.
        both_sides: Swap sides; if not, `player` is always team A.

    Raises:
        ValueError: If a number is negative, or `boards` is 0.
    """
    if min(games, first) < 0 or boards < 1:
        raise ValueError(f"need games >= 0, first >= 0, boards >= 1; got {games}, {first}, {boards}")
    if not both_sides:
        return _play_side(player, other, 0, range(first, first + games), seed, boards)
    end = first + games
    as_a = _play_side(player, other, 0, range((first + 1) // 2, (end + 1) // 2), seed, boards)
    return as_a + _play_side(player, other, 1, range(first // 2, end // 2), seed, boards)


def _play_side(player: Player, other: Player, side: int, numbers: range, seed: int, boards: int) -> Result:
    """Play the games that begin on the boards of these numbers, `player` as team `side`."""
    result = Result()
    for first in numbers[::boards]:
        count = min(boards, numbers.stop - first)
        scores, deaths = _play(player, other, side, Game(count, seed, first=first))
        wins = int((scores[:, 0] > scores[:, 1]).sum())
        draws = int((scores[:, 0] == scores[:, 1]).sum())
        games_as_a, wins_as_a = (count, wins) if side == 0 else (0, 0)
        score, other_score = scores.sum(0).tolist()
        died, other_died = deaths.sum(0).tolist()
        result += Result(
            games=count,
            wins=wins,
            draws=draws,
            games_as_a=games_as_a,
            wins_as_a=wins_as_a,
            score=score,
            deaths=died,
            other_score=other_score,
            other_deaths=other_died,
        )
    return result


def _play(player: Player, other: Player, side: int, game: Game) -> tuple[np.ndarray, np.ndarray]:
    """Play every board to its end; return scores and deaths, (n, 2) each, `player` first."""
    count = len(game.done)
    actions = np.zeros((count, SNAKES), np.uint8)
    scores, deaths = np.zeros((2, count, 2), np.int64)
    playing = np.ones(count, np.bool_)
    while playing.any():
        player(game.boards, side, actions)
        other(game.boards, 1 - side, actions)
        game.step(actions)
        deaths += playing[:, None] * game.died.reshape(count, 2, 3).sum(2)
        if game.done.any():
            ended = playing & game.done
            scores[ended] = game.scores()[ended]
            playing &= ~ended
            game.reset(game.done)  # a game that ended early must not be played on
    order = [side, 1 - side]
    return scores[:, order], deaths[:, order]


def _mean(total: int, games: int) -> float:
    return total / games if games else math.nan
