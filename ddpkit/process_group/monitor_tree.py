"""The tree along which the ranks hear of failures: rank 0 at its top, and at most 64 connections for each rank."""

from __future__ import annotations

CHILDREN = 63  # the most that a rank has


def parent_of(rank: int) -> int:
    """Return the rank above this one, which is not rank 0."""
    return (rank - 1) // CHILDREN


def children_of(rank: int, world_size: int) -> range:
    """Return the ranks below this one that are connected to it.

    >>> children_of(0, world_size=65), children_of(1, world_size=65), children_of(2, world_size=65)
    (range(1, 64), range(64, 65), range(65, 65))
    """
    first = rank * CHILDREN + 1
    return range(min(first, world_size), min(first + CHILDREN, world_size))


def is_below(rank: int, top: int) -> bool:
    """Return whether a rank's way to rank 0 leads over another, or is that rank itself."""
    while rank > top:
        rank = parent_of(rank)
    return rank == top


def monitor_key(rank: int) -> str:
    """Return the key under which a rank other than rank 0 says where its monitor listens."""
    return f"monitor/{rank}"
