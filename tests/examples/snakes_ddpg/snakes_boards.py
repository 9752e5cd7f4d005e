"""Boards in any state."""

from collections.abc import Sequence

import numpy as np
from snakes.game import BEAN, NEXT, NONE, SNAKES, Game


def place(
    game: Game, b: int, bodies: Sequence[Sequence[int]], headings: Sequence[int], beans: Sequence[int], time: int = 0
) -> None:
    """Put a board into a state: cells of each snake, head first; headings; cells of at most five beans."""
    at = game.boards
    at.cells[b] = 0
    at.beans[b] = NONE
    at.times[b] = time
    at.heads[b] = 0
    at.lengths[b] = [len(body) for body in bodies]
    at.headings[b] = headings
    for s, body in enumerate(bodies):
        at.bodies[b, s, : len(body)] = body
        np.add.at(at.cells[b], body, 1)
    at.beans[b, : len(beans)] = beans
    at.cells[b, beans] += BEAN


def wander(free: np.ndarray, rng: np.random.Generator) -> list[int]:
    """Make a snake of 3 to 40 cells at random, which it takes from the free ones."""
    while True:
        body = [int(rng.choice(np.flatnonzero(free)))]
        for _ in range(rng.integers(2, 40)):
            ahead = [int(cell) for cell in NEXT[body[0]] if free[cell] and cell not in body]
            body = [int(rng.choice(ahead)), *body] if ahead else body
        if len(body) >= 3:
            free[body] = False
            return body


def crowded(count: int, beans: int = 0) -> Game:
    """Make boards of six snakes of 3 to 40 cells, with fewer beans than a number."""
    rng = np.random.default_rng(2)
    game = Game(count)
    for b in range(count):
        free = np.ones(200, bool)
        bodies = [wander(free, rng) for _ in range(SNAKES)]
        meals = rng.choice(np.flatnonzero(free), rng.integers(beans + 1), replace=False)
        place(game, b, bodies, rng.integers(4, size=SNAKES).tolist(), meals.tolist())
    return game
