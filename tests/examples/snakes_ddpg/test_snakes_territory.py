"""The territory player, against a plain program of who owns which cell, and in positions made by hand."""

from __future__ import annotations

import numpy as np
import pytest
from snakes.game import DOWN, LEFT, NEXT, NONE, OPPOSITE, RIGHT, UP, Game
from snakes.opponents import OPPONENTS
from snakes.territory import ANY, _fill_bodies, _spread, territory
from snakes_boards import place

pytestmark = pytest.mark.storm  # the first time, compiling the players takes half a minute

FAR = [[20 * row + column for column in (1, 2, 3)] for row in (5, 6, 7)]  # out of the way


def row(start: tuple[int, int], length: int = 3) -> list[int]:
    """A snake along a row, its head on the left."""
    return [20 * start[0] + start[1] + i for i in range(length)]


def put(mine: list[list[int]], beans: list[int], others: list[list[int]] = FAR) -> Game:
    game = Game(1)
    place(game, 0, [*mine, *others][:6], [LEFT] * 6, beans)
    return game


def ask(game: Game, team: int = 0) -> list[int]:
    actions = np.zeros((len(game.done), 6), np.uint8)
    territory(game.boards, team, actions)
    return actions[0, 3 * team : 3 * team + 3].tolist()


def owners_of(game: Game, b: int) -> dict[int, tuple[int, set[int]]]:
    """Cells that are reached, by the step and the snakes: all go a step at once, and the shortest get a cell."""
    bodies = game.bodies(b)
    leaves = {cell: (len(body) - i, s) for s, body in enumerate(bodies) for i, cell in enumerate(body)}
    found = {body[0]: (0, {s}) for s, body in enumerate(bodies)}
    for step in range(1, 201):
        claims: dict[int, set[int]] = {}
        for cell, (when, snakes) in found.items():
            for direction in range(4):
                near = int(NEXT[cell, direction])
                for s in snakes if when == step - 1 and near not in found else ():
                    if when == 0 and direction == OPPOSITE[game.boards.headings[b, s]]:
                        continue
                    free, holder = leaves.get(near, (0, -1))
                    if step > free or (step == free and s == holder):
                        claims.setdefault(near, set()).add(s)
        for cell, snakes in claims.items():
            least = min(len(bodies[s]) for s in snakes)
            found[cell] = (step, {s for s in snakes if len(bodies[s]) == least})
    return {cell: claim for cell, claim in found.items() if claim[0] > 0}


def test_cells_are_owned_as_a_plain_program_finds():
    game = Game(8, seed=4)
    actions = np.zeros((8, 6), np.uint8)
    arrays = [np.empty(200, np.int64) for _ in range(5)]
    free_at, holder, steps, owners, queue = arrays
    shared = 0
    for time in range(120):
        if time % 30 == 29:
            for b in range(8):
                _fill_bodies(game.boards, b, free_at, holder)
                known = _spread(game.boards, b, np.full(6, ANY), free_at, holder, steps, owners, queue)
                cells = queue[6:known].tolist()
                sets = {cell: {s for s in range(6) if owners[cell] >> s & 1} for cell in cells}
                assert {cell: (int(steps[cell]), sets[cell]) for cell in cells} == owners_of(game, b)
                shared += sum(len(snakes) > 1 for snakes in sets.values())
                assert (steps == NONE).sum() == 200 - known
        OPPONENTS["foresighted"](game.boards, 0, actions)
        territory(game.boards, 1, actions)
        game.step(actions)
    assert shared > 0


def test_the_snake_that_is_there_first_takes_the_bean_and_another_the_next():
    game = put([row((0, 5)), row((0, 12)), row((2, 5))], [2, 10])
    assert ask(game)[:2] == [LEFT, LEFT]


def test_a_very_long_snake_follows_its_tail():
    ring = [20 * 3 + column for column in range(5, 17)] + [20 * 4 + column for column in range(16, 4, -1)]
    game = Game(1)
    place(game, 0, [ring, FAR[0], FAR[1], FAR[2], row((0, 10)), row((1, 10))], [LEFT, *[LEFT] * 5], [20 * 3 + 2])
    assert ask(game)[0] == DOWN  # into the cell that its tail leaves, though a bean lies straight on


def test_mates_do_not_enter_one_cell_and_nobody_reverses():
    game = Game(64, seed=8)
    actions = np.zeros((64, 6), np.uint8)
    for _ in range(100):
        for team in (0, 1):
            territory(game.boards, team, actions)
        assert (actions != OPPOSITE[game.boards.headings]).all()
        assert set(np.unique(actions)) <= {UP, DOWN, LEFT, RIGHT}
        game.step(actions)
        game.reset(game.done)
