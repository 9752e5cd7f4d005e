import itertools
from dataclasses import astuple

import numpy as np
import pytest
from snakes.evaluation import Result, _play, play_games
from snakes.game import Game
from snakes.opponents import OPPONENTS

pytestmark = pytest.mark.storm  # the first time, compiling the players takes half a minute

GREEDY, RANDOM, SHARING = OPPONENTS["greedy"], OPPONENTS["random"], OPPONENTS["sharing"]


def count_one_by_one(player, other, side, number, seed):
    """A whole game on a single board: the scores, `player` first."""
    game, actions = Game(1, seed, first=number), np.zeros((1, 6), np.uint8)
    for _ in range(200):
        player(game.boards, side, actions)
        other(game.boards, 1 - side, actions)
        game.step(actions)
    lengths = [len(body) for body in game.bodies(0)]
    scores = [sum(lengths[:3]) - 9, sum(lengths[3:]) - 9]
    return scores if side == 0 else scores[::-1]


@pytest.mark.parametrize("players", [(GREEDY, RANDOM), (RANDOM, RANDOM), (SHARING, GREEDY)])
def test_the_counts_are_those_of_games_played_one_by_one(players):
    games = [count_one_by_one(*players, side, k, seed=5) for k in range(15) for side in range(2)]
    expected = Result(
        games=30,
        wins=sum(mine > theirs for mine, theirs in games),
        draws=sum(mine == theirs for mine, theirs in games),
        score=sum(mine for mine, _ in games),
        other_score=sum(theirs for _, theirs in games),
    )
    assert play_games(*players, 30, seed=5) == expected


def test_shares_of_the_games_add_up_however_they_are_cut():
    whole = play_games(RANDOM, GREEDY, 41, seed=2)
    assert whole.games == 41
    for cuts in ([0, 41], [0, 1, 2, 20, 20, 41], [0, 7, 30, 41]):
        parts = [
            play_games(RANDOM, GREEDY, end - first, seed=2, first=first) for first, end in itertools.pairwise(cuts)
        ]
        assert sum(parts, Result()) == whole
    assert play_games(RANDOM, GREEDY, 41, seed=3) != whole


def test_a_game_that_ends_early_counts_with_its_score_at_that_time(monkeypatch):
    ends = np.array([1, 150, 200, 200])  # steps after which each board is done
    scores_then, clock = np.zeros((4, 2), int), 0

    class Short(Game):
        def step(self, actions):
            nonlocal clock
            super().step(actions)
            clock += 1
            self.done[:] = clock == ends
            scores_then[clock == ends] = self.scores()[clock == ends]

    result = _play(GREEDY, GREEDY, 0, Short(4))
    assert (result.score, result.other_score) == tuple(scores_then.sum(0))
    assert clock == 200


def test_rates_follow_from_the_counts():
    result = Result(games=10, wins=4, draws=1, score=25, other_score=5)
    assert result.losses == 5
    assert result.win_rate == 0.4
    assert result.standard_error == pytest.approx((0.4 * 0.6 / 10) ** 0.5)
    assert result.lead == 2
    assert str(result) == "4 of 10 games won, 1 drawn: win rate 0.400 +- 0.155, score 2.5 : 0.5"
    assert astuple(result + result) == tuple(2 * value for value in astuple(result))


def test_no_games_are_none_won():
    nothing = play_games(GREEDY, RANDOM, 0)
    assert nothing == Result()
    assert (nothing.win_rate, nothing.standard_error, nothing.lead) == (0, 0, 0)
