"""Two players of snakes that no training run and no choice of a model ever meets.

Each is of another idea than the players in `snakes/opponents.py`: one weighs shares of the board, one looks two steps
ahead for the worst that a rival can do. `snakes_strength.py` judges models by them.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from snakes.features import DIRECTION, DISTANCE, WAYS
from snakes.game import CELLS, NONE, SNAKES, START_LENGTH, Boards, foresee
from snakes.opponents import Player, greedy
from snakes.search import LIMIT, escape
from snakes.territory import ANY, _fill_bodies, _open_directions, _size, _spread

BEAN_CELLS = 40.0  # cells that a bean is worth that the team can take in the next step; in two steps half of that


@njit(cache=True, nogil=True)
def voronoi(boards: Boards, team: int, actions: np.ndarray) -> None:
    """Go, one snake after the other, to where the team owns most: cells, and beans by how near they are.

    A cell is owned by the snake that can be there first, as for `territory`, which does not weigh the two.
    """
    free_at, holder = np.empty(CELLS, np.int64), np.empty(CELLS, np.int64)
    steps, owners, queue = np.empty(CELLS, np.int64), np.empty(CELLS, np.int64), np.empty(CELLS, np.int64)
    firsts, directions, one = np.empty(SNAKES, np.int64), np.empty(4, np.int64), np.empty(1, np.int64)
    for b in range(len(actions)):
        _fill_bodies(boards, b, free_at, holder)
        firsts[:] = ANY
        for s in range(3 * team, 3 * team + 3):
            most = -1e9
            best = 0
            for i in range(_open_directions(boards, b, s, free_at, holder, directions)):
                firsts[s] = directions[i]
                known = _spread(boards, b, firsts, free_at, holder, steps, owners, queue)
                value = _size(team, owners, queue, known)
                for bean in boards.beans[b]:
                    if bean != NONE and steps[bean] != NONE:
                        one[0] = bean
                        value += BEAN_CELLS / max(1, steps[bean]) * _size(team, owners, one, 1)
                if value > most:
                    most = value
                    best = firsts[s]
            firsts[s] = best
            actions[b, s] = best


def minimax(boards: Boards, team: int, actions: np.ndarray) -> None:
    """Take the way after which two steps end best, if the nearest rival goes where it is worst in each.

    All others go as `greedy`. An end is worth the team's lead, and less for a far bean and for having no way out.
    """
    heads = np.take_along_axis(boards.bodies, boards.heads[..., None].astype(np.int64), axis=2)[..., 0]
    rivals = np.arange(3 - 3 * team, 6 - 3 * team)
    ends = np.indices((WAYS,) * 4).reshape(4, -1)  # the snake's and its rival's first ways, and their second ones
    count = len(boards.times) * ends.shape[1]
    rewards, died = np.zeros((count, SNAKES), np.int16), np.zeros((count, SNAKES), np.bool_)
    moves = np.zeros((count, SNAKES), np.uint8)
    every = np.arange(count)
    ends = np.tile(ends, len(boards.times))
    for s in range(3 * team, 3 * team + 3):
        rival = np.repeat(rivals[DISTANCE[heads[:, s, None], heads[:, rivals]].argmin(1)], WAYS**4)
        after = Boards(*(np.repeat(array, WAYS**4, axis=0) for array in boards))
        value = np.zeros(count)
        for step in (0, 1):
            greedy(after, 0, moves)
            greedy(after, 1, moves)
            if step == 0:  # the team-mates before it have chosen
                moves[:, 3 * team : s] = np.repeat(actions[:, 3 * team : s], WAYS**4, axis=0)
            moves[:, s] = DIRECTION[after.headings[:, s], ends[2 * step]]
            moves[every, rival] = DIRECTION[after.headings[every, rival], ends[2 * step + 1]]
            foresee(after, moves, rewards, died)
            sides = rewards.reshape(-1, 2, 3).sum(2)
            value += sides[:, team] - sides[:, 1 - team]
        value += _prospects(after, s)
        ways = value.reshape(-1, WAYS, WAYS, WAYS, WAYS).min(4).max(3).min(2).argmax(1)
        actions[:, s] = DIRECTION[boards.headings[:, s], ways]


def _prospects(boards: Boards, s: int) -> np.ndarray:
    """Value a snake's place: (n,)."""
    heads = boards.bodies[np.arange(len(boards.times)), s, boards.heads[:, s]]
    far = np.where(boards.beans == NONE, 99, DISTANCE[heads[:, None], boards.beans % CELLS]).min(1)
    steps = np.empty((len(boards.times), 3))
    escape(boards, s // 3, steps)
    gained = boards.lengths[:, s].astype(float) - START_LENGTH
    return -0.02 * far - (gained + 1) * (1 - steps[:, s % 3] / LIMIT)


STRANGERS: dict[str, Player] = {"voronoi": voronoi, "minimax": minimax}
