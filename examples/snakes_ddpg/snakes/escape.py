"""Find how long a snake can live where no other one can reach in its next step, by Numba."""

from __future__ import annotations

import numpy as np
from numba import njit

from .game import CELLS, NEXT, SNAKES, segment

LIMIT = 12  # steps after which a snake counts as safe
PLACES = 300  # that are tried; a snake that has so many to try counts as safe, too


@njit(cache=True, nogil=True)
def escape(boards, team, steps):
    """Fill `steps`, float64 of shape (n, 3), with the steps that each snake of a team can go on, at most LIMIT.

    It looks for a way along which every cell is free by then: all bodies, its own too, leave theirs
    from the tail on. The cells beside another head are not free: it may be there first.
    """
    leaves = np.zeros(CELLS, np.int64)
    for b in range(len(steps)):
        for k in range(3):
            _fill_leaves(boards, b, 3 * team + k, leaves)
            steps[b, k] = _escape(boards, b, 3 * team + k, leaves)


@njit(cache=True)
def _fill_leaves(boards, b, s, leaves):
    """Fill the step in which each cell is free again, at the end of which the head of snake `s` may enter it."""
    leaves[:] = 0
    for other in range(SNAKES):
        length = np.int64(boards.lengths[b, other])
        for i in range(length):
            cell = segment(boards, b, other, i)
            leaves[cell] = max(leaves[cell], length - i)
        if other == s or length == 0:
            continue
        for direction in range(4):
            cell = NEXT[segment(boards, b, other, 0), direction]
            leaves[cell] = max(leaves[cell], LIMIT)


@njit(cache=True)
def _escape(boards, b, s, leaves):
    """Search in depth for a way of one snake; change `leaves` on it."""
    path = np.zeros(LIMIT + 1, np.int64)  # its cells
    left = np.zeros(LIMIT + 1, np.int64)  # when each of them would have been free without the snake
    tried = np.zeros(LIMIT + 1, np.int64)  # directions tried from each
    path[0] = segment(boards, b, s, 0)
    places = 0
    longest = 0
    time = 0
    while time >= 0:
        if tried[time] == 4:  # back
            leaves[path[time]] = left[time]
            time -= 1
            continue
        cell = NEXT[path[time], tried[time]]
        tried[time] += 1
        if leaves[cell] > time + 1:
            continue
        time += 1
        places += 1
        longest = max(longest, time)
        if longest == LIMIT or places == PLACES:
            return LIMIT
        path[time] = cell
        left[time] = leaves[cell]
        leaves[cell] = time + np.int64(boards.lengths[b, s])
        tried[time] = 0
    return longest
