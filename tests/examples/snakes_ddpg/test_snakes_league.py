"""The league: who is met how often, which past selves it keeps, and that a checkpoint holds all of it."""

from __future__ import annotations

import io
from collections import Counter

import numpy as np
import pytest
import torch
from snakes.ddpg import Actor
from snakes.evaluation import League
from snakes.game import Game
from snakes.opponents import OPPONENTS

LADDER = ("greedy", "evasive")


def results(**counts: tuple[int, int]) -> Counter[str]:
    """Games met and won, by the number of the player."""
    sums: Counter[str] = Counter()
    for place in range(6):
        sums[f"met_{place}"], sums[f"beaten_{place}"] = counts.get(f"p{place}", (0, 0))
    return sums


def moves(player, seed: int) -> np.ndarray:
    game, actions = Game(50, seed), np.zeros((50, 6), np.uint8)
    player(game.boards, 0, actions)
    return actions


def test_a_new_league_meets_all_of_the_ladder_alike():
    league = League(LADDER, selves=2)
    assert league.players == [OPPONENTS[name] for name in LADDER]
    np.testing.assert_allclose(league.shares(), [0.5, 0.5])


def test_who_is_beaten_less_is_met_more():
    league = League(LADDER, selves=2)
    for _ in range(100):
        league.note(results(p0=(50, 45), p1=(50, 20)))
    beaten, open_ = 0.1 + 0.02, 0.6 + 0.02
    np.testing.assert_allclose(league.shares(), [beaten / (beaten + open_), open_ / (beaten + open_)], atol=1e-3)


def test_later_results_count_more_and_nobody_is_forgotten():
    league = League(LADDER, selves=1)
    for _ in range(60):
        league.note(results(p0=(50, 0), p1=(50, 25)))
    for _ in range(60):
        league.note(results(p0=(50, 50), p1=(50, 25)))
    shares = league.shares()
    assert 0.03 < shares[0] < 0.05 and shares.sum() == pytest.approx(1)


def test_selves_weigh_as_one_player_together_and_the_oldest_leaves():
    torch.manual_seed(0)
    league = League(LADDER, selves=2)
    actors = [Actor(4) for _ in range(3)]
    for count, actor in enumerate(actors, 1):
        league.add(actor)
        assert len(league.players) == 2 + min(count, 2)
        np.testing.assert_allclose(league.shares()[:2], [1 / 3, 1 / 3])
        np.testing.assert_allclose(league.shares()[2:].sum(), 1 / 3)
    for place, kept in ((2, 2), (3, 1)):
        state = league.players[place].actor.state_dict()
        assert all(torch.equal(state[name], value) for name, value in actors[kept].state_dict().items())


def test_a_self_stays_what_it_was():
    torch.manual_seed(0)
    league, actor = League(LADDER, selves=1), Actor(4)
    league.add(actor)
    before = moves(league.players[2], 1)
    with torch.no_grad():
        for parameter in actor.parameters():
            parameter.neg_()
    np.testing.assert_array_equal(moves(league.players[2], 1), before)


@pytest.mark.parametrize("selves", [0, 1, 2, 3])
def test_a_checkpoint_holds_all_of_it(selves):
    torch.manual_seed(0)
    league = League(LADDER, selves=2)
    for _ in range(selves):
        league.add(Actor(4))
    league.note(results(p0=(9, 4), p1=(3, 3), p2=(5, 1)))
    file = io.BytesIO()
    torch.save(league.state_dict(), file)
    file.seek(0)
    other = League(LADDER, selves=2)
    other.add(Actor(4))
    other.load_state_dict(torch.load(file), Actor(4))

    np.testing.assert_array_equal(other.shares(), league.shares())
    for mine, theirs in zip(league.players, other.players, strict=True):
        np.testing.assert_array_equal(moves(mine, 2), moves(theirs, 2))
    for both in (league, other):
        both.add(Actor(4))
    np.testing.assert_array_equal(other.shares(), league.shares())  # the same place was taken
