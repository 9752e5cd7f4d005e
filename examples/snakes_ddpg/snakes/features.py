"""What a snake sees: numbers about each way it can go, the same however the board is turned or shifted, compiled by Numba.

A snake goes left, straight on or right, seen along its heading. For each of these ways two floods spread from the cell it
leads to, step by step over free cells and around the borders: a free one, and a safe one that stays off every cell that
another snake could reach as early. They tell how far the next bean is, and how much room there is, as a snake with
bodies and rivals in its way would find out.

A set of cells is held in five 64-bit words of two rows each, and every flood runs for all boards at once, so that the
compiler can put several boards into one vector instruction.
"""

from __future__ import annotations

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
    STEPS,
    UP,
    segment,
)

WAYS = 3  # left, straight on, right
# DIRECTION[heading, way]
DIRECTION = np.array([[LEFT, UP, RIGHT], [RIGHT, DOWN, LEFT], [DOWN, LEFT, UP], [UP, RIGHT, DOWN]], np.uint8)
DEPTH = 10  # steps that a flood looks ahead
PER_WAY = 13
PER_SNAKE = 4
FEATURES = WAYS * PER_WAY + PER_SNAKE

WORDS = 5
ALL = np.uint64((1 << 2 * COLUMNS) - 1)
_cells = np.arange(CELLS)
_rows, _columns = (np.abs(np.subtract.outer(at, at)) for at in np.divmod(_cells, COLUMNS))
# DISTANCE[cell, cell]: steps around the borders, whatever is in the way
DISTANCE = (np.minimum(_rows, ROWS - _rows) + np.minimum(_columns, COLUMNS - _columns)).astype(np.uint8)
WORD = _cells // (2 * COLUMNS)
BIT = np.uint64(1) << (_cells % (2 * COLUMNS)).astype(np.uint64)
_LOW_ROW = np.uint64((1 << COLUMNS) - 1)
_FIRST = np.uint64(1 | 1 << COLUMNS)  # the first column of both rows
_LAST = np.uint64(_FIRST << np.uint64(COLUMNS - 1))
_ONE, _WRAP, _ROW = np.uint64(1), np.uint64(COLUMNS - 1), np.uint64(COLUMNS)


@njit(inline="always")
def _around(above, here, below):
    """The cells of a word whose neighbours are in a set, of which three words in turn are given."""
    right = ((here << _ONE) & ~_FIRST) | ((here >> _WRAP) & _FIRST)
    left = ((here >> _ONE) & ~_LAST) | ((here << _WRAP) & _LAST)
    down = ((here & _LOW_ROW) << _ROW) | (above >> _ROW)
    up = (here >> _ROW) | ((below & _LOW_ROW) << _ROW)
    return right | left | down | up


@njit(inline="always")
def _count(word):
    """Number of set bits of one word of at most 40."""
    m1, m2, m4 = np.uint64(0x5555555555555555), np.uint64(0x3333333333333333), np.uint64(0x0F0F0F0F0F0F0F0F)
    word = word - ((word >> np.uint64(1)) & m1)
    word = (word & m2) + ((word >> np.uint64(2)) & m2)
    word = (word + (word >> np.uint64(4))) & m4
    return (word * np.uint64(0x0101010101010101)) >> np.uint64(56)


@njit(cache=True)
def _spread(cells, open_cells):
    """Grows sets of cells (5, n) by one step, over open cells (5, n)."""
    for b in range(cells.shape[1]):
        c0, c1, c2, c3, c4 = cells[0, b], cells[1, b], cells[2, b], cells[3, b], cells[4, b]
        cells[0, b] = c0 | (_around(c4, c0, c1) & open_cells[0, b])
        cells[1, b] = c1 | (_around(c0, c1, c2) & open_cells[1, b])
        cells[2, b] = c2 | (_around(c1, c2, c3) & open_cells[2, b])
        cells[3, b] = c3 | (_around(c2, c3, c4) & open_cells[3, b])
        cells[4, b] = c4 | (_around(c3, c4, c0) & open_cells[4, b])


@njit(cache=True)
def _miss(cells, goals, distance):
    """Adds one to the distances (n,) of sets (5, n) that have not reached a goal."""
    for b in range(cells.shape[1]):
        hit = (
            (cells[0, b] & goals[0, b])
            | (cells[1, b] & goals[1, b])
            | (cells[2, b] & goals[2, b])
            | (cells[3, b] & goals[3, b])
            | (cells[4, b] & goals[4, b])
        )
        distance[b] += np.uint64(hit == np.uint64(0))


@njit(cache=True)
def _measure(cells, area):
    for b in range(cells.shape[1]):
        area[b] = (
            _count(cells[0, b])
            + _count(cells[1, b])
            + _count(cells[2, b])
            + _count(cells[3, b])
            + _count(cells[4, b])
        )


@njit(cache=True)
def _draw_sets(boards, first, free, beans):
    """Fills the sets of free cells and of beans, both (5, n). A tail that surely leaves in this step counts as free."""
    for b in range(free.shape[1]):
        board = first + b
        for w in range(WORDS):
            free[w, b] = ALL
            beans[w, b] = np.uint64(0)
        for s in range(SNAKES):
            length = np.int64(boards.lengths[board, s])
            head = segment(boards, board, s, 0)
            for way in range(4):
                if boards.cells[board, NEXT[head, way]] == BEAN:
                    break
            else:
                length -= 1
            for i in range(length):
                cell = segment(boards, board, s, i)
                free[WORD[cell], b] &= ~BIT[cell]
        for i in range(BEANS):
            cell = boards.beans[board, i]
            if cell != NONE:
                beans[WORD[cell], b] |= BIT[cell]


@njit(cache=True)
def _draw_heads(boards, first, but, heads):
    """Fills the sets (5, n) of all heads but one snake's."""
    for b in range(heads.shape[1]):
        for w in range(WORDS):
            heads[w, b] = np.uint64(0)
        for s in range(SNAKES):
            if s != but:
                cell = segment(boards, first + b, s, 0)
                heads[WORD[cell], b] |= BIT[cell]


@njit(cache=True)
def _draw_way(boards, first, s, way, free, cells):
    """Fills the sets (5, n) of the one cell that a way leads to, empty if that cell is not free."""
    for b in range(cells.shape[1]):
        cell = NEXT[segment(boards, first + b, s, 0), DIRECTION[boards.headings[first + b, s], way]]
        for w in range(WORDS):
            cells[w, b] = np.uint64(0)
        cells[WORD[cell], b] = BIT[cell] & free[WORD[cell], b]


@njit(cache=True)
def _remove(cells, others, rest):
    """Fills `rest` with the cells that are not among the others', all (5, n)."""
    for w in range(WORDS):
        for b in range(cells.shape[1]):
            rest[w, b] = cells[w, b] & ~others[w, b]


@njit(cache=True)
def _observe(boards, team, first, out):
    n = out.shape[0]
    free = np.empty((WORDS, n), np.uint64)
    beans, others, calm = np.empty_like(free), np.empty_like(free), np.empty_like(free)
    wide, safe = np.empty((WAYS, WORDS, n), np.uint64), np.empty((WAYS, WORDS, n), np.uint64)
    wide_misses, safe_misses = np.empty((WAYS, n), np.uint64), np.empty((WAYS, n), np.uint64)
    wide_area, safe_area, near_area = (
        np.empty((WAYS, n), np.uint64),
        np.empty((WAYS, n), np.uint64),
        np.empty((WAYS, n), np.uint64),
    )
    _draw_sets(boards, first, free, beans)
    for k in range(3):
        s = 3 * team + k
        _draw_heads(boards, first, s, others)
        wide_misses[:], safe_misses[:] = 0, 0
        for step in range(1, DEPTH + 1):
            _spread(others, free)
            _remove(free, others, calm)
            for way in range(WAYS):
                if step == 1:
                    _draw_way(boards, first, s, way, free, wide[way])
                    _draw_way(boards, first, s, way, calm, safe[way])
                else:
                    _spread(wide[way], free)
                    _spread(safe[way], calm)
                _miss(wide[way], beans, wide_misses[way])
                _miss(safe[way], beans, safe_misses[way])
                if step == DEPTH // 2:
                    _measure(safe[way], near_area[way])
        for way in range(WAYS):
            _measure(wide[way], wide_area[way])
            _measure(safe[way], safe_area[way])
        for b in range(n):
            board, row = first + b, out[b, k]
            head, length = segment(boards, board, s, 0), np.float32(boards.lengths[board, s])
            for way in range(WAYS):
                f = way * PER_WAY
                cell = NEXT[head, DIRECTION[boards.headings[board, s], way]]
                rivals, mates, stake = 0, 0, 0
                for o in range(SNAKES):
                    if o != s and DISTANCE[cell, segment(boards, board, o, 0)] == 1:
                        if o // 3 == team:
                            mates += 1
                        else:
                            rivals += 1
                            stake = max(stake, np.int64(boards.lengths[board, o]) - START_LENGTH)
                row[f] = (free[WORD[cell], b] & BIT[cell]) != 0
                row[f + 1] = boards.cells[board, cell] == BEAN
                row[f + 2] = rivals
                row[f + 3] = mates
                row[f + 4] = np.float32(stake) / 10
                wide_miss, safe_miss = np.float32(wide_misses[way, b]), np.float32(safe_misses[way, b])
                row[f + 5] = 1 / (1 + wide_miss) if wide_miss < DEPTH else 0
                row[f + 6] = wide_miss / DEPTH
                row[f + 7] = 1 / (1 + safe_miss) if safe_miss < DEPTH else 0
                row[f + 8] = safe_miss / DEPTH
                row[f + 9] = np.float32(near_area[way, b]) / 40
                row[f + 10] = np.float32(safe_area[way, b]) / 100
                row[f + 11] = np.float32(wide_area[way, b]) / 100
                row[f + 12] = min(np.float32(1), np.float32(wide_area[way, b]) / length)
            f = WAYS * PER_WAY
            ours, theirs = 0, 0
            for o in range(SNAKES):
                if o // 3 == team:
                    ours += boards.lengths[board, o]
                else:
                    theirs += boards.lengths[board, o]
            row[f] = (length - START_LENGTH) / 10
            row[f + 1] = np.float32(STEPS - boards.times[board]) / STEPS
            row[f + 2] = np.float32(ours - theirs) / 20
            row[f + 3] = np.float32(theirs) / 20


BLOCK = 256


@njit(cache=True, nogil=True)
def observe(boards, team, out):
    n = out.shape[0]
    for first in range(0, n, BLOCK):
        _observe(boards, team, first, out[first : first + BLOCK])
