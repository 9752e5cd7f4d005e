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
    """A whole game on a single board: scores and deaths, `player` first."""
    game, actions, deaths = Game(1, seed, first=number), np.zeros((1, 6), np.uint8), np.zeros(2, int)
    for _ in range(200):
        player(game.boards, side, actions)
        other(game.boards, 1 - side, actions)
        game.step(actions)
        deaths += game.died[0].reshape(2, 3).sum(1)
    lengths = [len(body) for body in game.bodies(0)]
    scores = [sum(lengths[:3]) - 9, sum(lengths[3:]) - 9]
    return (scores, deaths.tolist()) if side == 0 else (scores[::-1], deaths.tolist()[::-1])


@pytest.mark.parametrize("players", [(GREEDY, RANDOM), (RANDOM, RANDOM), (SHARING, GREEDY)])
def test_the_counts_are_those_of_games_played_one_by_one(players):
    games = [(side, *count_one_by_one(*players, side, k, seed=5)) for k in range(15) for side in range(2)]
    wins = [(side, scores[0] > scores[1]) for side, scores, _ in games]
    expected = Result(
        games=30,
        wins=sum(won for _, won in wins),
        draws=sum(scores[0] == scores[1] for _, scores, _ in games),
        games_as_a=15,
        wins_as_a=sum(won for side, won in wins if side == 0),
        score=sum(scores[0] for _, scores, _ in games),
        deaths=sum(deaths[0] for *_, deaths in games),
        other_score=sum(scores[1] for _, scores, _ in games),
        other_deaths=sum(deaths[1] for *_, deaths in games),
    )
    assert play_games(*players, 30, seed=5) == expected


@pytest.mark.parametrize("boards", [3, 8, 256])
def test_shares_of_the_games_add_up_however_they_are_cut_and_batched(monkeypatch, boards):
    whole = play_games(RANDOM, GREEDY, 41, seed=2)
    assert (whole.games, whole.games_as_a) == (41, 21)
    monkeypatch.setattr("snakes.evaluation.BOARDS", boards)
    for cuts in ([0, 41], [0, 1, 2, 20, 20, 41], [0, 7, 30, 41]):
        parts = [
            play_games(RANDOM, GREEDY, end - first, seed=2, first=first) for first, end in itertools.pairwise(cuts)
        ]
        assert sum(parts, Result()) == whole
    assert play_games(RANDOM, GREEDY, 41, seed=3) != whole


def test_a_game_that_ends_early_counts_with_its_score_at_that_time(monkeypatch):
    ends = np.array([1, 150, 200, 200])  # steps after which each board is done
    scores_then, deaths_then, clock = np.zeros((4, 2), int), np.zeros((4, 2), int), 0

    class Short(Game):
        def step(self, actions):
            nonlocal clock
            super().step(actions)
            clock += 1
            deaths_then[clock <= ends] += self.died.reshape(4, 2, 3).sum(2)[clock <= ends]
            self.done[:] = clock == ends
            scores_then[clock == ends] = self.scores()[clock == ends]

    result = _play(GREEDY, GREEDY, 0, Short(4))
    assert (result.score, result.other_score) == tuple(scores_then.sum(0))
    assert (result.deaths, result.other_deaths) == tuple(deaths_then.sum(0))
    assert clock == 200


def test_rates_follow_from_the_counts():
    result = Result(
        games=10, wins=4, draws=1, games_as_a=4, wins_as_a=3, score=25, deaths=7, other_score=5, other_deaths=12
    )
    assert result.losses == 5
    assert result.win_rate == 0.4
    assert result.standard_error == pytest.approx((0.4 * 0.6 / 10) ** 0.5)
    assert result.lead == 2
    assert str(result) == (
        "4 of 10 games won, 1 drawn: win rate 0.400 +- 0.155 (as A 0.750, as B 0.167), "
        "score 2.5 : 0.5, deaths 0.7 : 1.2"
    )
    assert astuple(result + result) == tuple(2 * value for value in astuple(result))


def test_no_games_have_no_rate():
    nothing = play_games(GREEDY, RANDOM, 0)
    assert nothing == Result()
    assert np.isnan([nothing.win_rate, nothing.standard_error, nothing.lead]).all() and "nan" in str(nothing)
