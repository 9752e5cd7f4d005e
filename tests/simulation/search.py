"""Searches simulated worlds for one in which the protocol breaks a promise; `python search.py joining 7` shows one."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable

import outside
import survivors
from scenarios import SCENARIOS

_COLLECT = 500  # worlds, after which what they left is collected


def put_in_place() -> None:
    """Put the simulated world under the protocol, for good in this process."""
    outside.put_in_place()
    survivors.put_in_place()


def look(scenario: str, seed: int, tells: bool = False) -> list[str]:
    """Simulate one world; return what was wrong."""
    world = outside.begin(seed, _tell if tells else None)
    try:
        return SCENARIOS[scenario](world)
    finally:
        world.close()


def search(scenario: str, seeds: Iterable[int]) -> dict[int, list[str]]:
    """Simulate worlds until one is wrong; return its seed, and what was wrong."""
    gc.disable()  # each world is full of cycles, and small
    try:
        for number, seed in enumerate(seeds):
            wrong = look(scenario, seed)
            if wrong:
                return {seed: wrong}
            if number % _COLLECT == 0:
                gc.collect()
    finally:
        gc.enable()
    return {}


def _tell(now: float, line: str) -> None:
    print(f"{now:.4f} {line}")


if __name__ == "__main__":
    put_in_place()
    print(look(sys.argv[1], int(sys.argv[2]), tells=True) or "nothing was wrong")
