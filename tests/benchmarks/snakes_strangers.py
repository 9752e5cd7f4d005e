"""Four players of snakes that no training run and no choice of a model ever meets.

Each is of another idea than the players in `snakes/opponents.py`: two weigh shares of the board, one of them after two
steps; one looks two steps ahead for the worst that a rival can do; one runs into its rivals. `snakes_strength.py` lets
models play against them.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from player.search import LIMIT, escape
from snakes.features import DIRECTION, DISTANCE, WAYS
from snakes.game import CELLS, NEXT, NONE, OPPOSITE, SNAKES, START_LENGTH, Boards, foresee, segment
from snakes.opponents import Player, _is_taken, foresighted, greedy
from snakes.territory import ANY, _fill_bodies, _open_directions, _size, _spread

SCENT = 3  # steps from which a hunter runs at a rival
BEAN_CELLS = 40.0  # cells that a bean is worth that the team can take in the next step; in two steps half of that


@njit(cache=True, nogil=True)
def voronoi(boards: Boards, team: int, actions: np.ndarray) -> None:
    """Go, one snake after the other, to where the team owns most: cells, and beans by how near they are.

    A cell is owned by the snake that can be there first, as for `territory`, which does not weigh the two.
    """
    firsts, directions = np.empty(SNAKES, np.int64), np.empty(4, np.int64)
    free_at, holder, steps, owners, queue = np.empty((5, CELLS), np.int64)
    for b in range(len(actions)):
        _fill_bodies(boards, b, free_at, holder)
        firsts[:] = ANY
        for s in range(3 * team, 3 * team + 3):
            most = -1e9
            best = 0
            for i in range(_open_directions(boards, b, s, free_at, holder, directions)):
                firsts[s] = directions[i]
                value = _share(boards, b, team, firsts, free_at, holder, steps, owners, queue)
                if value > most:
                    most = value
                    best = firsts[s]
            firsts[s] = best
            actions[b, s] = best


@njit(cache=True)
def _share(boards, b, team, firsts, free_at, holder, steps, owners, queue):
    """Add up what a team owns of a board if its snakes go these ways first: cells, and near beans."""
    known = _spread(boards, b, firsts, free_at, holder, steps, owners, queue)
    value = np.float64(_size(team, owners, queue, known))
    for bean in boards.beans[b]:
        if bean != NONE and steps[bean] != NONE:
            queue[0] = bean  # which is read no more
            value += BEAN_CELLS / max(1, steps[bean]) * _size(team, owners, queue, 1)
    return value


@njit(cache=True, nogil=True)
def _shares(boards, team, values):
    """Fill what a team owns of each board, for `far_voronoi`."""
    free_at, holder, steps, owners, queue = np.empty((5, CELLS), np.int64)
    firsts = np.full(SNAKES, ANY, np.int64)
    for b in range(len(values)):
        _fill_bodies(boards, b, free_at, holder)
        values[b] = _share(boards, b, team, firsts, free_at, holder, steps, owners, queue)


def far_voronoi(boards: Boards, team: int, actions: np.ndarray) -> None:
    """Take the way after which, two steps later, the team owns most; a length gained counts as a bean within reach."""
    ways = np.indices((WAYS, WAYS)).reshape(2, 1, -1)
    for s in range(3 * team, 3 * team + 3):
        after, gains = _look_ahead(boards, actions, s, [s], ways)
        values = np.empty(len(gains))
        _shares(after, team, values)
        values += BEAN_CELLS * gains.reshape(-1, 2, 3).sum(2)[:, team]
        best = values.reshape(-1, WAYS, WAYS).max(2).argmax(1)
        actions[:, s] = DIRECTION[boards.headings[:, s], best]


def _look_ahead(
    boards: Boards, actions: np.ndarray, s: int, movers: list, ways: np.ndarray
) -> tuple[Boards, np.ndarray]:
    """Play two steps for each of some `ends` on a copy of every board; return the copies, and the gains of all snakes.

    The `movers`, a snake's number each, or one per board, go the `ways`, (2, movers, ends); team-mates before `s` first
    take their `actions`; all others go as `greedy`.
    """
    ends = ways.shape[-1]
    after = Boards(*(np.repeat(array, ends, axis=0) for array in boards))
    every = np.arange(len(after.times))
    moves, died = np.zeros((len(every), SNAKES), np.uint8), np.zeros((len(every), SNAKES), np.bool_)
    rewards, gains = np.zeros((2, len(every), SNAKES), np.int16)
    for step in (0, 1):
        greedy(after, 0, moves)
        greedy(after, 1, moves)
        if step == 0:
            mates = slice(s // 3 * 3, s)
            moves[:, mates] = np.repeat(actions[:, mates], ends, axis=0)
        for mover, way in zip(movers, ways[step], strict=True):
            each = np.repeat(np.broadcast_to(mover, len(boards.times)), ends)
            moves[every, each] = DIRECTION[after.headings[every, each], np.tile(way, len(boards.times))]
        foresee(after, moves, rewards, died)
        gains += rewards
    return after, gains


def minimax(boards: Boards, team: int, actions: np.ndarray) -> None:
    """Take the way after which two steps end best, if the nearest rival goes where it is worst in each.

    All others go as `greedy`. An end is worth the team's lead, and less for a far bean and for having no way out.
    """
    heads = np.take_along_axis(boards.bodies, boards.heads[..., None].astype(np.int64), axis=2)[..., 0]
    rivals = np.arange(3 - 3 * team, 6 - 3 * team)
    ends = np.indices((WAYS,) * 4).reshape(2, 2, -1)  # in each step, the snake's ways and its rival's
    for s in range(3 * team, 3 * team + 3):
        rival = rivals[DISTANCE[heads[:, s, None], heads[:, rivals]].argmin(1)]
        after, gains = _look_ahead(boards, actions, s, [s, rival], ends)
        sides = gains.reshape(-1, 2, 3).sum(2)
        value = sides[:, team] - sides[:, 1 - team] + _prospects(after, s)
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


@njit(cache=True, nogil=True)
def hunter(boards: Boards, team: int, actions: np.ndarray) -> None:
    """Run at the head of the longest rival nearby, if it has more to lose; else play as `foresighted`.

    Where two heads meet both snakes lose all that they gained.
    """
    foresighted(boards, team, actions)
    for b in range(len(actions)):
        for s in range(3 * team, 3 * team + 3):
            head = segment(boards, b, s, 0)
            prey = s
            for rival in range(3 - 3 * team, 6 - 3 * team):
                near = DISTANCE[head, segment(boards, b, rival, 0)] <= SCENT
                if near and boards.lengths[b, rival] > boards.lengths[b, prey]:
                    prey = rival
            goal = NEXT[segment(boards, b, prey, 0), boards.headings[b, prey]]
            least = 1000
            for direction in range(4):
                cell = NEXT[head, direction]
                closed = direction == OPPOSITE[boards.headings[b, s]] or _is_taken(boards, b, cell)
                if prey != s and not closed and DISTANCE[cell, goal] < least:
                    actions[b, s] = direction
                    least = DISTANCE[cell, goal]


STRANGERS: dict[str, Player] = {
    "voronoi": voronoi,
    "minimax": minimax,
    "hunter": hunter,
    "far_voronoi": far_voronoi,
}
