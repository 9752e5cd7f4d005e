"""Play as scripted players, compiled, on many boards at once.

A player is called as `player(boards, team, actions)`. It writes the directions of its team (0: snakes 0 to 2, 1: snakes
3 to 5) on all boards into `actions[:, 3 * team : 3 * team + 3]`; actions have shape (n, 6), uint8.
"""

from collections.abc import Callable

import numpy as np
from numba import njit

from .game import BEAN, BEANS, CELLS, COLUMNS, NEXT, NONE, OPPOSITE, SNAKES, UP, Boards, draw, segment
from .territory import territory

NEVER = np.uint8(255)  # more steps than any way has
Player = Callable[[Boards, int, np.ndarray], None]


@njit(cache=True, nogil=True)
def random(boards, team, actions):
    """Go in any direction, reversals too, drawn from the board's own stream."""
    for b in range(len(actions)):
        for s in range(3 * team, 3 * team + 3):
            actions[b, s] = draw(boards, b, 4)


@njit(cache=True, inline="always")
def _is_taken(boards, b, cell):
    """Tell if a cell holds a segment, be it a tail that is about to leave."""
    return boards.cells[b, cell] & ~BEAN > 0


@njit(cache=True, inline="always")
def _squared_distance(cell, other):
    """Measure without wrap, as the public greedy does."""
    rows = np.int64(cell) // COLUMNS - np.int64(other) // COLUMNS
    columns = np.int64(cell) % COLUMNS - np.int64(other) % COLUMNS
    return rows * rows + columns * columns


@njit(cache=True, nogil=True)
def greedy(boards, team, actions):
    """Play as the public greedy player, exactly: go to the nearest bean that no team-mate before it has claimed.

    Of equals it takes the first, in the order of `boards.beans` and of UP, DOWN, LEFT, RIGHT; with no cell free, UP.
    """
    for b in range(len(actions)):
        claimed = 0  # bit i: bean i
        for s in range(3 * team, 3 * team + 3):
            head = segment(boards, b, s, 0)
            bean = -1
            nearest = 1000
            for i in range(BEANS):
                if claimed >> i & 1 == 0 and boards.beans[b, i] != NONE:
                    distance = _squared_distance(head, boards.beans[b, i])
                    if distance < nearest:
                        bean = i
                        nearest = distance
            claimed |= 1 << bean if bean >= 0 else 0
            goal = boards.beans[b, bean] if bean >= 0 else head

            actions[b, s] = UP
            nearest = 1000
            for direction in range(4):
                cell = NEXT[head, direction]
                distance = _squared_distance(cell, goal)
                if not _is_taken(boards, b, cell) and distance < nearest:
                    actions[b, s] = direction
                    nearest = distance


@njit(cache=True, nogil=True)
def wandering(boards, team, actions):
    """Go in any direction in which the next cell is free; UP if there is none."""
    for b in range(len(actions)):
        for s in range(3 * team, 3 * team + 3):
            actions[b, s] = UP
            free = 0
            for direction in range(4):
                if not _is_taken(boards, b, NEXT[segment(boards, b, s, 0), direction]):
                    free += 1
                    if draw(boards, b, free) == 0:  # each of them with the same probability
                        actions[b, s] = direction


@njit(cache=True, nogil=True)
def evasive(boards, team, actions):
    """Take the move that comes nearest to any bean, of those after which a snake lives on for two steps.

    If there are none, the same of those that it survives for one step; then UP. Distances and ties as for `greedy`.
    """
    for b in range(len(actions)):
        for s in range(3 * team, 3 * team + 3):
            actions[b, s] = UP
            least = 10_000
            for direction in range(4):
                cell = NEXT[segment(boards, b, s, 0), direction]
                if _is_taken(boards, b, cell):
                    continue
                cost = 1000  # more than any distance
                for onward in range(4):
                    if not _is_taken(boards, b, NEXT[cell, onward]):
                        cost = 0
                nearest = 999
                for bean in boards.beans[b]:
                    if bean != NONE:
                        nearest = min(nearest, _squared_distance(cell, bean))
                if cost + nearest < least:
                    actions[b, s] = direction
                    least = cost + nearest


@njit(cache=True, nogil=True)
def sharing(boards, team, actions):
    """Take the shortest way around bodies and borders to a bean, which the nearest snake claims."""
    _plan(boards, team, actions, False)


@njit(cache=True, nogil=True)
def foresighted(boards, team, actions):
    """Play as `sharing`, but first go where there is room for the snake, and no enemy as early."""
    _plan(boards, team, actions, True)


@njit(cache=True, nogil=True)
def _plan(boards, team, actions, needs_room):
    """Measure each snake's ways to all beans, share the beans out, and choose directions."""
    busy, steps, rival_steps, queue = np.empty((4, CELLS), np.uint8)
    nobody = np.full(CELLS, NEVER, np.uint8)
    distances = np.empty((3, 4, BEANS), np.int64)  # snake, direction, bean
    rooms = np.empty((3, 4), np.int64)
    goals = np.empty(3, np.int64)
    for b in range(len(actions)):
        _fill_busy(boards, b, busy)
        if needs_room:
            for k in range(3):
                queue[k] = segment(boards, b, 3 - 3 * team + k, 0)
            _flood(queue, 3, 0, CELLS, busy, nobody, rival_steps)
        distances[:] = NEVER
        rooms[:] = CELLS
        for k in range(3):
            s = 3 * team + k
            for direction in range(4):
                if not _is_open(boards, b, s, direction, busy):
                    continue
                queue[0] = NEXT[segment(boards, b, s, 0), direction]
                _flood(queue, 1, 1, CELLS, busy, nobody, steps)
                for i in range(BEANS):
                    if boards.beans[b, i] != NONE:
                        distances[k, direction, i] = steps[boards.beans[b, i]]
                if needs_room:
                    rooms[k, direction] = 0
                    if rival_steps[queue[0]] > 1:
                        rooms[k, direction] = _flood(queue, 1, 1, boards.lengths[b, s], busy, rival_steps, steps)
        _claim(distances, goals)
        for k in range(3):
            s = 3 * team + k
            direction = _choose(boards, b, s, busy, distances[k, :, goals[k]], rooms[k])
            actions[b, s] = direction
            busy[NEXT[segment(boards, b, s, 0), direction]] = NEVER  # the team-mates after it stay off


@njit(cache=True)
def _fill_busy(boards, b, busy):
    """Fill the first step in which each cell can be entered; a snake that may eat in the first step leaves later."""
    busy[:] = 0
    for s in range(SNAKES):
        length = np.int64(boards.lengths[b, s])
        eats = 0
        for direction in range(4):
            if boards.cells[b, NEXT[segment(boards, b, s, 0), direction]] == BEAN:
                eats = 1
        for i in range(length):
            busy[segment(boards, b, s, i)] = length - i + eats


@njit(cache=True)
def _flood(queue, known, step, enough, busy, rivals, steps):
    """Spread breadth first from the `known` cells of a queue, reached in a step, over cells that are free in time.

    Stay off the cells that rivals reach as early. Fill the step in which each cell is reached, NEVER if it is not;
    return how many are reached, which need not be more than `enough`.
    """
    steps[:] = NEVER
    for i in range(known):
        steps[queue[i]] = step
    looked_at = 0
    while looked_at < known < enough:
        at = queue[looked_at]
        looked_at += 1
        step = np.uint8(steps[at] + 1)
        for direction in range(4):
            cell = NEXT[at, direction]
            if steps[cell] == NEVER and busy[cell] <= step < rivals[cell]:
                steps[cell] = step
                queue[known] = cell
                known += 1
    return known


@njit(cache=True, inline="always")
def _is_open(boards, b, s, direction, busy):
    """Tell if a snake can go there; a reversal would be replaced by a random direction."""
    return busy[NEXT[segment(boards, b, s, 0), direction]] <= 1 and direction != OPPOSITE[boards.headings[b, s]]


@njit(cache=True)
def _claim(distances, goals):
    """Give each snake a bean of its own: of all pairs the nearest first. What cannot be reached is as good as any."""
    left = distances.copy()
    for _ in range(3):
        nearest = left.argmin()
        snake, bean = nearest // (4 * BEANS), nearest % BEANS
        goals[snake] = bean
        left[snake] = NEVER + 1
        left[:, :, bean] = NEVER + 1


@njit(cache=True)
def _choose(boards, b, s, busy, distances, rooms):
    """Choose the open direction with the least lack of room, then nearest to the goal; else that which frees first."""
    best = UP
    least = 2_000_000
    for direction in range(4):
        cell = NEXT[segment(boards, b, s, 0), direction]
        if _is_open(boards, b, s, direction, busy):
            cost = 1000 * max(0, boards.lengths[b, s] - rooms[direction]) + np.int64(distances[direction])
        else:
            cost = 1_000_000 + np.int64(busy[cell])
        for mate in range(s + 1, s // 3 * 3 + 3):
            for back in range(4):
                cost += NEXT[cell, back] == segment(boards, b, mate, 0)  # if there is a choice, leave it the cell
        if cost < least:
            best = direction
            least = cost
    return best


def ask(player: Player, boards: Boards, team: int, which: np.ndarray, actions: np.ndarray) -> None:
    """Let a player fill a team's columns of the actions, (n, 6), on some of the boards alone, by their numbers."""
    picked = boards.pick(which)
    moves = np.empty((len(which), SNAKES), np.uint8)
    player(picked, team, moves)
    snakes = slice(3 * team, 3 * team + 3)
    actions[which, snakes] = moves[:, snakes]
    boards.streams[which] = picked.streams


_players = (random, wandering, evasive, greedy, sharing, foresighted, territory)
OPPONENTS: dict[str, Player] = {player.__name__: player for player in _players}
# by difficulty; the README has their wins against greedy, which tests/benchmarks/snakes_ladder.py counts
LEVELS = ("random", "wandering", "greedy", "sharing", "foresighted")
LADDER = ("evasive", "greedy", "sharing", "foresighted", "territory")  # those worth training against


def get(opponent: str | int) -> Player:
    """Find the player of a name or of a difficulty from 0 to 4; raise a ValueError that lists them if there is none."""
    levels = {str(level): name for level, name in enumerate(LEVELS)}
    name = levels.get(str(opponent), opponent)
    if name not in OPPONENTS:
        raise ValueError(
            f"there is no opponent {opponent!r}: choose one of {', '.join(OPPONENTS)}, "
            f"or a difficulty from 0 to {len(LEVELS) - 1}"
        )
    return OPPONENTS[name]
