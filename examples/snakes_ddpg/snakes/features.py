"""Compute what a snake sees: numbers about each way it can go, alike however the board is turned or shifted, by Numba.

A snake goes left, straight on or right, seen along its heading. For each of these ways two floods spread from the cell
it leads to, step by step over free cells and around the borders: a wide one, and a safe one that stays off every cell
that another snake could reach as early. They tell how near the next bean is and how much room there is.

A set of cells is held in five 64-bit words of two rows each, and every loop runs over all boards, so that the compiler
can put several boards into one vector instruction. Arrays of sets are (5, n), uint64.
"""

import numpy as np
from numba import njit

from .game import (
    BEAN,
    BEANS,
    CELLS,
    COLUMNS,
    DOWN,
    LEFT,
    NEXT,
    NONE,
    RIGHT,
    ROWS,
    SNAKES,
    START_LENGTH,
    UP,
    Boards,
    segment,
)

WAYS = 3  # left, straight on, right
# DIRECTION[heading, way]
DIRECTION = np.array([[LEFT, UP, RIGHT], [RIGHT, DOWN, LEFT], [DOWN, LEFT, UP], [UP, RIGHT, DOWN]], np.uint8)
DEPTH = 10  # steps that a flood looks ahead
BLOCK = 256  # boards that share the working arrays, so that they stay in the cache
PER_WAY = 13
PER_SNAKE = 3
FEATURES = WAYS * PER_WAY + PER_SNAKE

_cells = np.arange(CELLS)
_rows, _columns = (np.abs(np.subtract.outer(at, at)) for at in np.divmod(_cells, COLUMNS))
# DISTANCE[cell, cell]: steps around the borders, whatever is in the way
DISTANCE = (np.minimum(_rows, ROWS - _rows) + np.minimum(_columns, COLUMNS - _columns)).astype(np.uint8)


# Sets of cells that spread

WORDS = 5
ALL = np.uint64((1 << 2 * COLUMNS) - 1)
WORD = _cells // (2 * COLUMNS)
BIT = np.uint64(1) << (_cells % (2 * COLUMNS)).astype(np.uint64)
_LOW_ROW = np.uint64((1 << COLUMNS) - 1)
_FIRST = np.uint64(1 | 1 << COLUMNS)  # the first column of both rows
_LAST = np.uint64(_FIRST << np.uint64(COLUMNS - 1))
_ONE = np.uint64(1)
_WRAP = np.uint64(COLUMNS - 1)
_ROW = np.uint64(COLUMNS)


@njit(inline="always")
def around(above, here, below):
    """Find the cells of a word whose neighbours are in a set, of which three words in turn are given."""
    right = ((here << _ONE) & ~_FIRST) | ((here >> _WRAP) & _FIRST)
    left = ((here >> _ONE) & ~_LAST) | ((here << _WRAP) & _LAST)
    down = ((here & _LOW_ROW) << _ROW) | (above >> _ROW)
    up = (here >> _ROW) | ((below & _LOW_ROW) << _ROW)
    return right | left | down | up


@njit(cache=True)
def spread(cells, open_cells):
    """Grow sets of cells (5, n) by one step, over open cells (5, n)."""
    for b in range(cells.shape[1]):
        c0, c1, c2, c3, c4 = cells[0, b], cells[1, b], cells[2, b], cells[3, b], cells[4, b]
        cells[0, b] = c0 | (around(c4, c0, c1) & open_cells[0, b])
        cells[1, b] = c1 | (around(c0, c1, c2) & open_cells[1, b])
        cells[2, b] = c2 | (around(c1, c2, c3) & open_cells[2, b])
        cells[3, b] = c3 | (around(c2, c3, c4) & open_cells[3, b])
        cells[4, b] = c4 | (around(c3, c4, c0) & open_cells[4, b])


@njit(inline="always")
def count(word):
    """Count the set bits of one word of at most 40."""
    m1 = np.uint64(0x5555555555555555)
    m2 = np.uint64(0x3333333333333333)
    m4 = np.uint64(0x0F0F0F0F0F0F0F0F)
    word = word - ((word >> np.uint64(1)) & m1)
    word = (word & m2) + ((word >> np.uint64(2)) & m2)
    word = (word + (word >> np.uint64(4))) & m4
    return (word * np.uint64(0x0101010101010101)) >> np.uint64(56)


@njit(cache=True)
def _miss(cells, goals, distance):
    """Add one to the distances (n,) of sets (5, n) that have not reached a goal."""
    for b in range(cells.shape[1]):
        hit = np.uint64(0)
        for w in range(WORDS):
            hit |= cells[w, b] & goals[w, b]
        distance[b] += np.uint64(hit == np.uint64(0))


@njit(cache=True)
def _measure(cells, area):
    """Fill `area` (n,) with the sizes of sets (5, n)."""
    for b in range(cells.shape[1]):
        area[b] = count(cells[0, b]) + count(cells[1, b]) + count(cells[2, b]) + count(cells[3, b]) + count(cells[4, b])


@njit(cache=True)
def _draw_sets(boards, first, free, beans, heads):
    """Fill the sets (5, n) of free cells, beans and heads. A tail that surely leaves in this step counts as free."""
    free[:] = ALL
    beans[:] = 0
    heads[:] = 0
    for b in range(free.shape[1]):
        board = first + b
        for s in range(SNAKES):
            length = np.int64(boards.lengths[board, s])
            head = segment(boards, board, s, 0)
            heads[WORD[head], b] |= BIT[head]
            for way in range(4):
                if boards.cells[board, NEXT[head, way]] == BEAN:
                    break
            else:
                length -= 1
            for i in range(length):
                cell = segment(boards, board, s, i)
                free[WORD[cell], b] &= ~BIT[cell]
        for i in range(BEANS):
            if boards.beans[board, i] != NONE:
                cell = boards.beans[board, i]
                beans[WORD[cell], b] |= BIT[cell]


@njit(cache=True)
def _draw_way(boards, first, s, way, free, cells):
    """Fill the sets (5, n) of the one cell that a way leads to, empty if that cell is not free."""
    cells[:] = 0
    for b in range(cells.shape[1]):
        cell = NEXT[segment(boards, first + b, s, 0), DIRECTION[boards.headings[first + b, s], way]]
        cells[WORD[cell], b] = BIT[cell] & free[WORD[cell], b]


@njit(cache=True, nogil=True)
def observe(boards, team, seen):
    """Fill `seen`, float32 of shape (n, 3, FEATURES), with what the three snakes of a team see on each board."""
    for first in range(0, len(seen), BLOCK):
        _observe(boards, team, first, seen[first : first + BLOCK])


def see(boards: Boards, *teams: int) -> np.ndarray:
    """Compute what the snakes of one team or of both see, in this order: float32 of shape (n, 3 per team, FEATURES)."""
    seen = np.empty((len(teams), len(boards.times), 3, FEATURES), np.float32)
    for place, team in enumerate(teams):
        observe(boards, team, seen[place])
    return np.concatenate(seen, axis=1)


@njit(cache=True)
def _observe(boards, team, first, seen):
    """Observe a block of boards that begins with number `first`."""
    n = len(seen)
    sets = np.empty((5, WORDS, n), np.uint64)  # to unpack it would hide from Numba that its parts are contiguous
    free, beans, heads, others, calm = sets[0], sets[1], sets[2], sets[3], sets[4]
    wide = np.empty((WAYS, WORDS, n), np.uint64)
    safe = np.empty_like(wide)
    misses = np.empty((2, WAYS, n), np.uint64)  # steps of the wide and of the safe flood without a bean
    areas = np.empty((3, WAYS, n), np.uint64)  # of the wide flood, the safe one, and the safe one half-way
    _draw_sets(boards, first, free, beans, heads)
    for k in range(3):
        s = 3 * team + k
        others[:] = heads
        for b in range(n):
            own = segment(boards, first + b, s, 0)
            others[WORD[own], b] ^= BIT[own]
        misses[:] = 0
        for step in range(1, DEPTH + 1):
            spread(others, free)
            for w in range(WORDS):
                for b in range(n):
                    calm[w, b] = free[w, b] & ~others[w, b]
            for way in range(WAYS):
                if step == 1:
                    _draw_way(boards, first, s, way, free, wide[way])
                    _draw_way(boards, first, s, way, calm, safe[way])
                else:
                    spread(wide[way], free)
                    spread(safe[way], calm)
                _miss(wide[way], beans, misses[0, way])
                _miss(safe[way], beans, misses[1, way])
                if step == DEPTH // 2:
                    _measure(safe[way], areas[2, way])
        for way in range(WAYS):
            _measure(wide[way], areas[0, way])
            _measure(safe[way], areas[1, way])
        for b in range(n):
            for way in range(WAYS):
                features = seen[b, k, way * PER_WAY : (way + 1) * PER_WAY]
                _describe_way(boards, first + b, s, way, free[:, b], misses[:, way, b], areas[:, way, b], features)
            _describe_snake(boards, first + b, s, seen[b, k, WAYS * PER_WAY :])


@njit(cache=True)
def _describe_way(boards, b, s, way, free, misses, areas, features):
    """Fill the features of a way of one snake, of which the floods' misses and areas are given."""
    cell = NEXT[segment(boards, b, s, 0), DIRECTION[boards.headings[b, s], way]]
    rivals = 0  # rivals whose heads can enter the cell too
    mates = 0  # the same of team-mates
    stake = 0  # the greatest gain that a rival would lose
    for other in range(SNAKES):
        if other != s and DISTANCE[cell, segment(boards, b, other, 0)] == 1:
            if other // 3 == s // 3:
                mates += 1
            else:
                rivals += 1
                stake = max(stake, np.int64(boards.lengths[b, other]) - START_LENGTH)
    features[0] = (free[WORD[cell]] & BIT[cell]) != 0
    features[1] = boards.cells[b, cell] == BEAN
    features[2] = rivals
    features[3] = mates
    features[4] = stake / 10
    for flood in range(2):  # how near the next bean is, 0 if it is not in sight
        features[5 + 2 * flood] = 1 / (1 + misses[flood]) if misses[flood] < DEPTH else 0.0
        features[6 + 2 * flood] = misses[flood] / DEPTH
    features[9] = areas[0] / 100
    features[10] = areas[1] / 100
    features[11] = areas[2] / 40
    length = max(1, np.int64(boards.lengths[b, s]))  # 0 if it found no place to respawn, which ends the episode
    features[12] = min(1.0, areas[0] / length)  # below 1 it may not fit


@njit(cache=True)
def _describe_snake(boards, b, s, features):
    """Fill the features that are not of a way: the snake's gain, and the standing of the game."""
    first = s // 3 * 3
    ours = np.int64(boards.lengths[b, first : first + 3].sum())
    theirs = np.int64(boards.lengths[b].sum()) - ours
    features[0] = (np.int64(boards.lengths[b, s]) - START_LENGTH) / 10
    features[1] = (ours - theirs) / 20
    features[2] = theirs / 20
