"""Play as scripted players, compiled, on many boards at once.

A player is called as `player(boards, team, actions)` and writes the directions of the three snakes
of its team (0: snakes 0 to 2, 1: snakes 3 to 5) on all boards into `actions[:, 3 * team : 3 * team
+ 3]`; actions have shape (n, 6), uint8.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numba import njit

from .features import ALL, BIT, WORD, WORDS, add, count, holds, remove, spread_edge
from .game import BEAN, BEANS, CELLS, COLUMNS, NEXT, NONE, OPPOSITE, SNAKES, UP, Boards, draw, segment
from .territory import territory

FLOODED = 64  # boards whose floods go on at once, so that they stay in the cache
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

    Of equals it takes the first, in the order of `boards.beans` and of UP, DOWN, LEFT, RIGHT; with
    no cell free it goes UP.
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

    If there are none, the same of those that it survives for one step; then UP. Distances and ties
    as for `greedy`.
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
    for first in range(0, len(actions), FLOODED):
        _plan_block(boards, team, first, actions[first : first + FLOODED], needs_room)


@njit(cache=True)
def _plan_block(boards, team, first, actions, needs_room):
    """Plan for a block of boards, which begins with number `first`: all their floods go on at once."""
    n = len(actions)
    busy = np.empty((n, CELLS), np.uint8)
    eats = np.empty((n, SNAKES), np.int64)
    distances = np.full((n, 3, 4, BEANS), NONE)  # snake, direction, bean
    rooms = np.full((n, 3, 4), CELLS)
    goals = np.empty(3, np.int64)
    for b in range(n):
        _fill_busy(boards, first + b, busy[b], eats[b])
    _measure_ways(boards, team, first, busy, eats, distances, rooms, needs_room)
    for b in range(n):
        _claim(distances[b], goals)
        for k in range(3):
            s = 3 * team + k
            direction = _choose(boards, first + b, s, busy[b], distances[b, k, :, goals[k]], rooms[b, k])
            actions[b, s] = direction
            busy[b, NEXT[segment(boards, first + b, s, 0), direction]] = NONE  # the team-mates after it stay off


@njit(cache=True)
def _measure_ways(boards, team, first, busy, eats, distances, rooms, needs_room):
    """Fill how many steps each bean is away and how much room there is, for each snake and direction.

    Floods spread breadth first over cells that are free in time; those that look for room stay off
    cells that the rivals reach as early.
    """
    n = len(busy)
    free = np.full((WORDS, n), ALL)
    beans = np.zeros((WORDS, n), np.uint64)
    rivals = np.zeros((WORDS, n), np.uint64)
    calm = np.empty((WORDS, n), np.uint64)  # cells that no rival can reach as early
    edges = np.zeros((2, 3, 4, WORDS, n), np.uint64)  # of floods to beans, and for room; snake; direction
    for b in range(n):
        _draw_board(boards, first + b, b, team, busy[b], free, beans, rivals)
    rivals_edge = rivals.copy()
    spread_edge(rivals, rivals_edge, free)
    for b in range(n):
        for k in range(3):
            for direction in range(4):
                if _is_open(boards, first + b, 3 * team + k, direction, busy[b]):
                    cell = NEXT[segment(boards, first + b, 3 * team + k, 0), direction]
                    add(edges[0, k, direction], b, cell)
                    if needs_room and not holds(rivals, b, cell):
                        add(edges[1, k, direction], b, cell)
    known = edges.copy()
    step = 1
    spreads = True
    while spreads:
        for k in range(3):
            for direction in range(4):
                _note_beans(boards, first, edges[0, k, direction], beans, step, distances[:, k, direction])
        step += 1
        for b in range(n):
            _open_cells(boards, first + b, b, step, eats[b], free)
        spread_edge(rivals, rivals_edge, free)
        remove(free, rivals, calm)
        spreads = False
        for k in range(3):
            for direction in range(4):
                spreads |= spread_edge(known[0, k, direction], edges[0, k, direction], free)
                if needs_room:
                    spreads |= spread_edge(known[1, k, direction], edges[1, k, direction], calm)
    if needs_room:
        for b in range(n):
            for k in range(3):
                for direction in range(4):
                    if _is_open(boards, first + b, 3 * team + k, direction, busy[b]):
                        size = np.uint64(0)
                        for w in range(WORDS):
                            size += count(known[1, k, direction, w, b])
                        rooms[b, k, direction] = size


@njit(cache=True)
def _draw_board(boards, board, b, team, busy, free, beans, rivals):
    """Fill a board's sets of cells that are free in the first step, of beans and of the rivals' heads."""
    for s in range(SNAKES):
        for i in range(boards.lengths[board, s]):
            cell = segment(boards, board, s, i)
            if busy[cell] > 1:
                free[WORD[cell], b] &= ~BIT[cell]
    for i in range(BEANS):
        if boards.beans[board, i] != NONE:
            add(beans, b, boards.beans[board, i])
    for i in range(3):
        add(rivals, b, segment(boards, board, 3 - 3 * team + i, 0))


@njit(cache=True)
def _open_cells(boards, board, b, step, eats, free):
    """Add the cells that bodies leave for a step."""
    for s in range(SNAKES):
        i = np.int64(boards.lengths[board, s]) + eats[s] - step
        if 0 <= i < boards.lengths[board, s]:
            add(free, b, segment(boards, board, s, i))


@njit(cache=True)
def _note_beans(boards, first, edge, beans, step, distances):
    """Note the beans, (n, BEANS), that floods reach in a step."""
    for b in range(len(distances)):
        hit = np.uint64(0)
        for w in range(WORDS):
            hit |= edge[w, b] & beans[w, b]
        if hit != np.uint64(0):
            for i in range(BEANS):
                if boards.beans[first + b, i] != NONE and holds(edge, b, boards.beans[first + b, i]):
                    distances[b, i] = step


@njit(cache=True)
def _fill_busy(boards, b, busy, eats):
    """Fill `busy` with the first step in which each cell can be entered, as far as the bodies go.

    `eats` becomes 1 for a snake that may eat in the first step.
    """
    busy[:] = 0
    for s in range(SNAKES):
        length = np.int64(boards.lengths[b, s])
        eats[s] = 0  # 1: its tail stays for a step
        for direction in range(4):
            if boards.cells[b, NEXT[segment(boards, b, s, 0), direction]] == BEAN:
                eats[s] = 1
        for i in range(length):
            busy[segment(boards, b, s, i)] = length - i + eats[s]


@njit(cache=True, inline="always")
def _is_open(boards, b, s, direction, busy):
    """Tell if a snake can go there; a reversal would be replaced by a random direction."""
    return busy[NEXT[segment(boards, b, s, 0), direction]] <= 1 and direction != OPPOSITE[boards.headings[b, s]]


@njit(cache=True)
def _claim(distances, goals):
    """Give each snake a bean of its own: of all pairs the nearest first. What cannot be reached is as good as any."""
    goals[:] = -1
    claimed = 0  # bit i: bean i
    for _ in range(3):
        snake = -1
        bean = -1
        nearest = 256
        for k in range(3):
            if goals[k] >= 0:
                continue
            for direction in range(4):
                for i in range(BEANS):
                    if distances[k, direction, i] < nearest and claimed >> i & 1 == 0:
                        snake = k
                        bean = i
                        nearest = np.int64(distances[k, direction, i])
        goals[snake] = bean
        claimed |= 1 << bean


@njit(cache=True)
def _choose(boards, b, s, busy, distances, rooms):
    """Choose the open direction with the least lack of room, then the nearest to the goal.

    If there is none, it is the one that frees first.
    """
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


OPPONENTS: dict[str, Player] = {
    "random": random,
    "wandering": wandering,
    "evasive": evasive,
    "greedy": greedy,
    "sharing": sharing,
    "foresighted": foresighted,
    "territory": territory,
}
# by difficulty; they win .006, .046, .47, .81, .94 of 2,000 games against greedy
# (tests/benchmarks/snakes_ladder.py)
LEVELS = ("random", "wandering", "greedy", "sharing", "foresighted")
LADDER = ("evasive", "greedy", "sharing", "foresighted", "territory")  # those worth training against


def get(opponent: str | int) -> Player:
    """Find the player of a name or of a difficulty from 0 to 4.

    Raises:
        ValueError: If there is none; the message lists those there are.
    """
    levels = {str(level): name for level, name in enumerate(LEVELS)}
    name = levels.get(str(opponent), opponent)
    if name not in OPPONENTS:
        raise ValueError(
            f"there is no opponent {opponent!r}: choose one of {', '.join(OPPONENTS)}, "
            f"or a difficulty from 0 to {len(LEVELS) - 1}"
        )
    return OPPONENTS[name]
