"""Scripted players, compiled, for many boards at once.

A player is called as `player(boards, team, actions)` and writes the directions of the three snakes of its team (0:
snakes 0 to 2, 1: snakes 3 to 5) on all boards into `actions[:, 3 * team : 3 * team + 3]`; actions have shape (n, 6),
uint8.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numba import njit

from snakes.game import BEAN, BEANS, COLUMNS, NEXT, NONE, UP, Boards, draw, segment

Player = Callable[[Boards, int, np.ndarray], None]


@njit(cache=True, nogil=True)
def random(boards, team, actions):
    """Any direction, reversals too, drawn from the board's own stream."""
    for b in range(len(actions)):
        for s in range(3 * team, 3 * team + 3):
            actions[b, s] = draw(boards, b, 4)


@njit(cache=True, inline="always")
def _is_taken(boards, b, cell):
    """Whether a cell holds a segment, be it a tail that is about to leave."""
    return boards.cells[b, cell] & ~BEAN > 0


@njit(cache=True, inline="always")
def _squared_distance(cell, other):
    """Euclidean and without wrap, as the public greedy measures."""
    rows = np.int64(cell) // COLUMNS - np.int64(other) // COLUMNS
    columns = np.int64(cell) % COLUMNS - np.int64(other) % COLUMNS
    return rows * rows + columns * columns


@njit(cache=True, nogil=True)
def greedy(boards, team, actions):
    """The public greedy player, exactly: to the nearest bean that no team-mate before it has claimed.

    Of equals it takes the first, in the order of `boards.beans` and of UP, DOWN, LEFT, RIGHT; with no cell free it
    goes UP.
    """
    for b in range(len(actions)):
        claimed = 0  # bit i: bean i
        for s in range(3 * team, 3 * team + 3):
            head, bean, nearest = segment(boards, b, s, 0), -1, 1000
            for i in range(BEANS):
                if claimed >> i & 1 == 0 and boards.beans[b, i] != NONE:
                    distance = _squared_distance(head, boards.beans[b, i])
                    if distance < nearest:
                        bean, nearest = i, distance
            claimed |= 1 << bean if bean >= 0 else 0
            goal = boards.beans[b, bean] if bean >= 0 else head

            actions[b, s], nearest = UP, 1000
            for direction in range(4):
                cell = NEXT[head, direction]
                distance = _squared_distance(cell, goal)
                if not _is_taken(boards, b, cell) and distance < nearest:
                    actions[b, s], nearest = direction, distance


OPPONENTS: dict[str, Player] = {"random": random, "greedy": greedy}
LEVELS = ("random", "random", "greedy", "greedy", "greedy")  # names by difficulty


def get(opponent: str | int) -> Player:
    """The player of a name or of a difficulty from 0 to 4.

    Raises:
        ValueError: If there is none; the message lists those there are.
    """
    if isinstance(opponent, int) and 0 <= opponent < len(LEVELS):
        opponent = LEVELS[opponent]
    if opponent not in OPPONENTS:
        raise ValueError(
            f"there is no opponent {opponent!r}: choose one of {', '.join(OPPONENTS)}, "
            f"or a difficulty from 0 to {len(LEVELS) - 1}"
        )
    return OPPONENTS[opponent]
