"""Elo: what chances of games it was made of, what its errors say, and that nobody is infinitely strong."""

from __future__ import annotations

import numpy as np
import pytest
from snakes.rating import elo


def chances(ratings: np.ndarray) -> np.ndarray:
    return 1 / (1 + 10 ** ((ratings[None, :] - ratings[:, None]) / 400))


def test_ratings_are_those_that_the_chances_were_made_of():
    true = np.array([-300.0, -20.0, 0.0, 120.0, 200.0])
    games = 1e6 * (1 - np.eye(5))
    ratings, errors = elo(games * chances(true), games)
    np.testing.assert_allclose(ratings, true, atol=0.01)
    assert (errors < 1).all()


def test_the_errors_are_those_of_drawn_games():
    true, rng = np.array([-100.0, 0.0, 100.0]), np.random.default_rng(0)
    games = 200 * (1 - np.eye(3))
    found = []
    for _ in range(300):
        wins = np.triu(rng.binomial(200, chances(true)), 1)
        ratings, errors = elo(wins + np.tril(200 - wins.T, -1), games)
        found.append(ratings)
    np.testing.assert_allclose(np.std(found, axis=0), errors, rtol=0.2)


def test_who_won_all_and_who_never_played_are_rated_too():
    games = np.array([[0, 100, 0], [100, 0, 0], [0, 0, 0]])
    ratings, errors = elo(np.array([[0, 100, 0], [0, 0, 0], [0, 0, 0]]), games)
    assert 600 < ratings[0] - ratings[1] < 1000 and np.isfinite(errors).all()
    assert ratings[2] == pytest.approx(0) and errors[2] > errors[0] / 2
