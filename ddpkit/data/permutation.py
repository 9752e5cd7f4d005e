"""Make random orders of [0, n): functions from positions to numbers, without a list of them."""

from __future__ import annotations

from collections.abc import Callable
from math import isqrt

import numpy as np
import numpy.typing as npt

Positions = npt.NDArray[np.int64]
Order = Callable[[Positions], Positions]

# A permutation in memory up to here: 1 MB and 1.5 ms, and all orders equally likely.
_IN_MEMORY = 2**17


def shuffled(n: int, key: int) -> Order:
    """Make a random order of [0, n), the same on every platform and NumPy version.

    Up to 2**17 it is a true permutation. Beyond it is a keyed bijection: six Feistel rounds with
    random tables of about sqrt(n) entries each on rows x columns >= n.

    Args:
        n: Length of the order, positive.
        key: Seed in [0, 2**63).

    Returns:
        A function from positions, int64 in [0, n), to the numbers there, in the same shape.

    References:
        Luby and Rackoff, How to construct pseudorandom permutations from pseudorandom functions,
        1988. Black and Rogaway, Ciphers with arbitrary finite domains, 2002 (rows x columns, and
        walking back inside).

    Example:
        >>> sorted(shuffled(5, key=1)(np.arange(5)).tolist())
        [0, 1, 2, 3, 4]
    """
    bits = np.random.PCG64(key)
    if n > _IN_MEMORY:
        return bijection(n, bits)
    generator = np.random.RandomState(bits)  # no NumPy release may change its stream
    return generator.permutation(n).take


def bijection(n: int, bits: np.random.PCG64) -> Order:
    """Make a bijection on [0, n), with the statistics of a random one from about n = 1000 on.

    It uses raw bits only.
    """
    root = isqrt(n - 1) + 1
    # rows x columns exceeds n by as little as possible
    rows = min(range(root, root + 64), key=lambda rows: -n % rows)
    columns = -(-n // rows)
    rounds = [(_table(bits, columns, rows), _table(bits, rows, columns)) for _ in range(3)]

    def mixed(positions: Positions) -> Positions:
        row = positions // columns
        column = positions - row * columns
        for row_shift, column_shift in rounds:
            row = _wrapped(row + row_shift.take(column), rows)
            column = _wrapped(column + column_shift.take(row), columns)
        return row * columns + column

    def order(positions: Positions) -> Positions:
        numbers = mixed(positions)
        beyond = np.flatnonzero(numbers >= n)
        while beyond.size:  # walk on until back inside: that keeps it a bijection
            numbers[beyond] = mixed(numbers[beyond])
            beyond = np.flatnonzero(numbers >= n)
        return numbers

    return order


def _table(bits: np.random.PCG64, length: int, below: int) -> Positions:
    return (bits.random_raw(length) % np.uint64(below)).astype(np.int64)


def _wrapped(values: Positions, size: int) -> Positions:
    """Return `values % size` for 0 <= values < 2 * size, but quicker."""
    unsigned = values.view(np.uint64)
    smaller = (values - size).view(np.uint64)  # a negative number is a huge one without its sign
    return np.minimum(unsigned, smaller).view(np.int64)
