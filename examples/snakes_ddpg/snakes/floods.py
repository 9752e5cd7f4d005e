"""Hold sets of cells as bits, and let them spread over a board, on many boards at once.

A set is held in five 64-bit words of two rows each, and every loop runs over all boards, so that
the compiler can put several boards into one vector instruction. Arrays of sets are (5, n), uint64.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from .game import CELLS, COLUMNS

WORDS = 5
ALL = np.uint64((1 << 2 * COLUMNS) - 1)
_cells = np.arange(CELLS)
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


@njit(cache=True)
def spread_edge(known, edge, open_cells):
    """Grow sets by one step, from their edges, which were new in the step before; return if any grew.

    Unlike in `spread()`, a cell that opens later is entered only by those who come to it then.
    """
    new = np.empty_like(edge)
    for w in range(WORDS):
        above, here, below = edge[w - 1], edge[w], edge[(w + 1) % WORDS]
        for b in range(known.shape[1]):
            new[w, b] = around(above[b], here[b], below[b]) & open_cells[w, b] & ~known[w, b]
    grew = np.uint64(0)
    for w in range(WORDS):
        for b in range(known.shape[1]):
            edge[w, b] = new[w, b]
            known[w, b] |= new[w, b]
            grew |= new[w, b]
    return grew != np.uint64(0)


@njit(cache=True)
def remove(cells, others, rest):
    """Fill `rest` with the cells that are not among the others', all (5, n)."""
    for w in range(WORDS):
        for b in range(cells.shape[1]):
            rest[w, b] = cells[w, b] & ~others[w, b]


@njit(cache=True)
def add(cells, b, cell):
    """Add a cell to the set of a board."""
    cells[WORD[cell], b] |= BIT[cell]


@njit(cache=True)
def holds(cells, b, cell):
    """Tell if the set of a board holds a cell."""
    return cells[WORD[cell], b] & BIT[cell] != np.uint64(0)


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
