"""How long a snake can go on, compiled and as the submission finds it, against a game that is played on."""

from __future__ import annotations

import numpy as np
import pytest
import snakes.submission_template as template
from snakes.game import NEXT, RIGHT, SNAKES, Game
from snakes.search import LIMIT, PLACES, escape
from snakes_boards import crowded, place

pytestmark = pytest.mark.storm  # it compiles what it tests


def steps_of(game: Game) -> np.ndarray:
    """The steps of all snakes, (n, 6)."""
    steps = np.zeros((2, len(game.done), 3))
    escape(game.boards, 0, steps[0])
    escape(game.boards, 1, steps[1])
    return np.concatenate(steps, axis=1)


def play_on(bodies: list[list[int]], s: int, closed: set[int], steps: int, tries: list[int]) -> int:
    """The most steps of a snake, by moving it in all ways while the other bodies shrink from their tails."""
    if steps == LIMIT or tries[0] > PLACES:
        return steps
    shorter = [body[:-1] for body in bodies]
    taken = closed.union(*shorter)
    longest = steps
    for cell in NEXT[bodies[s][0]].tolist():
        if cell not in taken:
            tries[0] += 1
            moved = [*shorter[:s], [cell, *shorter[s]], *shorter[s + 1 :]]
            longest = max(longest, play_on(moved, s, closed, steps + 1, tries))
        if longest == LIMIT:
            break
    return longest


def test_a_snake_goes_on_as_long_as_a_game_lets_it():
    game = crowded(60)
    steps = steps_of(game)
    known = 0
    for b in range(60):
        bodies = game.bodies(b)
        for s in range(SNAKES):
            heads = [body[0] for i, body in enumerate(bodies) if i != s]
            tries = [0]
            wanted = play_on(bodies, s, set(NEXT[heads].reshape(-1).tolist()), 0, tries)
            assert template.escape(bodies, s) == steps[b, s]
            if tries[0] < PLACES:
                assert steps[b, s] == wanted
                known += wanted < LIMIT
    assert known > 20


def test_a_snake_in_a_coil_goes_on_once_its_tail_has_left():
    #  10 11 12 13
    #  30 [h] 32 33    the head at 31 is shut in; the tail, at 11, leaves first
    body = [31, 32, 52, 51, 50, 30, 10, 11]
    far = [[100 + 20 * i, 101 + 20 * i, 102 + 20 * i] for i in range(5)]
    game = Game(1)
    place(game, 0, [body, *far], [RIGHT] * SNAKES, [])
    assert steps_of(game)[0, 0] == LIMIT
    place(game, 0, [[*body, 12], *far], [RIGHT] * SNAKES, [])
    assert steps_of(game)[0, 0] == 0
