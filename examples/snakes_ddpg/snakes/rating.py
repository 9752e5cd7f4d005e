"""Rate players by the games that they played with each other: Elo, with its error."""

from __future__ import annotations

import numpy as np

SCALE = np.log(10) / 400  # 400 points mean odds of 10 : 1


def elo(points: np.ndarray, games: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Find the ratings that make the results most likely, if chances follow from differences of Elo.

    One drawn game more of each pair keeps the ratings finite where somebody won all.

    Args:
        points: (n, n), of the player of a row in games with that of a column: 1 for a win, 1/2 for
            a draw.
        games: (n, n), 0 on the diagonal.

    Returns:
        Ratings around a mean of 0, and their standard errors, both (n,).

    References:
        Bradley and Terry, Rank analysis of incomplete block designs (1952).
    """
    others = 1 - np.eye(len(games))
    games = games + others
    points = points + others / 2
    ratings = np.zeros(len(games))
    while True:
        chances = 1 / (1 + np.exp(SCALE * (ratings[None, :] - ratings[:, None])))
        weights = SCALE**2 * games * chances * (1 - chances)
        information = np.diag(weights.sum(1)) - weights
        covariance = np.linalg.pinv(information, hermitian=True)
        step = covariance @ (SCALE * (points - games * chances).sum(1))
        ratings = ratings + step.clip(-400, 400)
        if abs(step).max() < 0.01:
            return ratings - ratings.mean(), np.sqrt(np.diag(covariance))
