"""What snakes see, against searches with sets and queues, on boards that are played, drawn or made by hand."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np
import pytest
from snakes.features import BLOCK, FEATURES, observe
from snakes.game import DOWN, LEFT, NONE, RIGHT, UP, Boards, Game
from snakes.opponents import greedy
from snakes_boards import place

pytestmark = pytest.mark.storm  # it plays, and compiles what it plays with

STEP = {UP: (-1, 0), DOWN: (1, 0), LEFT: (0, -1), RIGHT: (0, 1)}
FAR = [[r * 20 + c for c in (17, 18, 19)] for r in range(6)]  # six snakes out of the way


class State(NamedTuple):
    bodies: list[list[int]]
    headings: list[int]
    beans: list[int]


def states_of(game: Game) -> list[State]:
    at, n = game.boards, len(game.done)
    beans = [[int(cell) for cell in at.beans[b] if cell != NONE] for b in range(n)]
    return [State(game.bodies(b), at.headings[b].tolist(), beans[b]) for b in range(n)]


def see(states: list[State]) -> np.ndarray:
    """What all snakes of all boards see: (n, 6, FEATURES)."""
    game = Game(len(states))
    for b, state in enumerate(states):
        place(game, b, *state)
    return see_boards(game.boards)


def see_boards(boards: Boards) -> np.ndarray:
    seen = np.full((2, len(boards.times), 3, FEATURES), np.nan, np.float32)
    for team in range(2):
        observe(boards, team, seen[team])
    return np.concatenate(seen, axis=1)


# The reference: cells are (row, column)


def around(cell: tuple[int, int]) -> list[tuple[int, int]]:
    return [((cell[0] + r) % 10, (cell[1] + c) % 20) for r, c in STEP.values()]


def flood(starts: list[tuple[int, int]], at: int, enters) -> dict[tuple[int, int], int]:
    """Cells by the number of steps, at most ten, in which a walk enters them that is at its starts after `at` steps."""
    steps, queue = dict.fromkeys(starts, at), deque(starts)
    while queue:
        cell = queue.popleft()
        for near in around(cell) if steps[cell] < 10 else ():
            if near not in steps and enters(near, steps[cell] + 1):
                steps[near] = steps[cell] + 1
                queue.append(near)
    return steps


def expected(state: State) -> list[list[float]]:
    """What the six snakes of a board are to see."""
    bodies = [[divmod(cell, 20) for cell in body] for body in state.bodies]
    beans, heads = {divmod(cell, 20) for cell in state.beans}, [body[0] for body in bodies]
    taken = set()
    for body in bodies:
        may_eat = any(cell in beans for cell in around(body[0]))
        taken.update(body if may_eat else body[:-1])
    gains = [len(body) - 3 for body in bodies]

    rows = []
    for s, head in enumerate(heads):
        others = [o for o in range(6) if o != s]
        enemies = [o for o in others if (o < 3) != (s < 3)]
        threat = flood([heads[o] for o in others], 0, lambda cell, step: cell not in taken)
        enters = [
            lambda cell, step: cell not in taken,
            lambda cell, step, threat=threat: cell not in taken and threat.get(cell, 99) > step,
        ]
        r, c = STEP[state.headings[s]]
        row = []
        for dr, dc in ((-c, r), (r, c), (c, -r)):  # left, straight on, right
            cell = ((head[0] + dr) % 10, (head[1] + dc) % 20)
            near = [o for o in others if cell in around(heads[o])]
            rivals = [o for o in near if o in enemies]
            wide, safe = (flood([cell], 1, enter) if enter(cell, 1) else {} for enter in enters)
            row += [cell not in taken, cell in beans, len(rivals), len(near) - len(rivals)]
            row += [max([gains[o] for o in rivals], default=0) / 10]
            for steps in (wide, safe):
                bean = min((steps[cell] for cell in beans if cell in steps), default=None)
                row += [0, 1] if bean is None else [1 / bean, (bean - 1) / 10]
            row += [len(wide) / 100, len(safe) / 100, sum(step <= 5 for step in safe.values()) / 40]
            row += [min(1, len(wide) / len(bodies[s]))]
        theirs = sum(gains[o] + 3 for o in enemies)
        rows.append([*row, gains[s] / 10, (sum(gains) + 18 - 2 * theirs) / 20, theirs / 20])
    return rows


def check(states: list[State], seen: np.ndarray) -> None:
    for b, state in enumerate(states):
        wanted = np.array(expected(state), np.float64).astype(np.float32)
        np.testing.assert_array_equal(seen[b], wanted, err_msg=f"board {b}: {state}")


# Boards


def play(boards: int, steps: int, chance: float, seed: int) -> Game:
    """Plays greedily, and with some chance each snake anyhow."""
    game, rng, actions = Game(boards, seed), np.random.default_rng(seed), np.zeros((boards, 6), np.uint8)
    for _ in range(steps):
        greedy(game.boards, 0, actions)
        greedy(game.boards, 1, actions)
        anyhow = rng.random(actions.shape) < chance
        actions[anyhow] = rng.integers(0, 4, anyhow.sum())
        game.step(actions)
    return game


def draw_states(count: int, seed: int) -> list[State]:
    """Boards full of long snakes that wind anyhow and look anywhere."""
    rng, states = np.random.default_rng(seed), []
    while len(states) < count:
        free, bodies = set(range(200)), []
        for _ in range(6):
            body = [int(rng.choice(sorted(free)))]
            free.discard(body[0])
            for _ in range(int(rng.integers(2, 30))):
                row, column = divmod(body[-1], 20)
                near = [r * 20 + c for r, c in around((row, column)) if r * 20 + c in free]
                if not near:
                    break
                body.append(int(rng.choice(near)))
                free.discard(body[-1])
            bodies.append(body)
        if min(map(len, bodies)) >= 3:
            beans = rng.permutation(sorted(free))[: rng.integers(0, 6)]
            states.append(State(bodies, rng.integers(0, 4, 6).tolist(), beans.tolist()))
    return states


@pytest.mark.parametrize(("steps", "chance"), [(0, 0), (60, 1.0), (60, 0.3), (150, 0.02)])
def test_snakes_in_games_see_what_searches_with_queues_find(steps, chance):
    game = play(BLOCK + 9, steps, chance, seed=steps)
    if steps == 150:
        assert game.boards.lengths.max() > 12
    check(states_of(game), see_boards(game.boards))


def test_long_snakes_see_what_searches_with_queues_find():
    states = draw_states(BLOCK + 9, seed=3)
    assert max(len(body) for state in states for body in state.bodies) == 30
    check(states, see(states))


def test_a_board_looks_alike_whatever_boards_are_beside_it():
    boards = play(2 * BLOCK + 1, 30, 0.1, seed=4).boards
    seen = see_boards(boards)
    for n in (0, 1, BLOCK - 1, BLOCK, BLOCK + 1):
        some = Boards(*(array[-n:] if n else array[:0] for array in boards))
        np.testing.assert_array_equal(see_boards(some), seen[-n:] if n else seen[:0])


# Boards made by hand: ways are (free, bean, rivals, mates, stake, near, far, near safe, far safe, room, safe room,
# safe room in five steps, share that fits)


def cells(*at: tuple[int, int]) -> list[int]:
    return [r * 20 + c for r, c in at]


def ways_of_first(bodies: dict[int, list[int]], beans: list[int], heading: int = RIGHT) -> list[list[float]]:
    """What snake 0 sees of its ways, with the other snakes out of the way."""
    state = State([bodies.get(s, FAR[s]) for s in range(6)], [heading, *[RIGHT] * 5], beans)
    return see([state])[0, 0, :39].reshape(3, 13).tolist()


def tube(length: int) -> list[int]:
    """A wall around row 5 from column 1 to `length`."""
    ends = range(length + 2)
    return cells(*((4, c) for c in ends), (5, length + 1), *((6, c) for c in reversed(ends)), (5, 0))


def approx(*values: float):
    return pytest.approx(values, abs=1e-7)


def test_a_pocket_has_as_much_room_as_it_has_cells():
    left, straight, right = ways_of_first({0: cells((5, 4), (5, 3), (5, 2), (5, 1)), 4: tube(7)}, cells((5, 7)))
    assert straight == approx(1, 0, 0, 0, 0, 1 / 3, 0.2, 1 / 3, 0.2, 0.03, 0.03, 3 / 40, 3 / 4)
    assert left == right == approx(*[0] * 6, 1, 0, 1, *[0] * 4)


@pytest.mark.parametrize(("bean", "near", "far"), [(4, 1, 0), (5, 1 / 2, 0.1), (13, 1 / 10, 0.9), (14, 0, 1)])
def test_a_flood_goes_ten_steps(bean, near, far):
    way = ways_of_first({0: cells((5, 3), (5, 2), (5, 1)), 4: tube(15)}, cells((5, bean)))[1]
    assert way == approx(1, int(bean == 4), 0, 0, 0, near, far, near, far, 0.10, 0.10, 5 / 40, 1)


@pytest.mark.parametrize("head", [9, 10])
def test_the_safe_flood_stays_off_what_a_rival_enters_as_early(head):
    """Between heads at columns 4 and 9 there are two cells for each; between 4 and 10 the middle one is nobody's."""
    snakes = {0: cells((5, 4), (5, 3), (5, 2)), 5: cells(*((5, head + i) for i in range(7)))}
    free = head - 5
    way = ways_of_first({**snakes, 4: tube(17)}, cells((5, 7)))[1]
    assert way == approx(1, 0, 0, 0, 0, 1 / 3, 0.2, 0, 1, free / 100, 0.02, 2 / 40, 1)


def test_heads_that_can_enter_a_cell_too_count_by_team_with_the_longest_rivals_gain():
    first, mate = cells((5, 5), (5, 4), (5, 3)), cells((5, 7), (5, 8), (5, 9), (5, 10))
    rival, longer = cells((4, 6), (3, 6), (2, 6)), cells((6, 6), *((7, c) for c in range(6, 11)))
    left, straight, right = ways_of_first({0: first, 1: mate, 3: rival, 4: longer}, [])
    assert straight[:5] == approx(1, 0, 2, 1, 0.3)
    assert straight[9:] == approx(0.01, 0, 0, 1 / 3)  # heads all around: a cell to enter, but not a safe one
    assert left[:5] == approx(1, 0, 1, 0, 0)
    assert right[:5] == approx(1, 0, 1, 0, 0.3)


@pytest.mark.parametrize(("beans", "free"), [([], 1), (cells((4, 4)), 0), (cells((4, 5)), 1)])
def test_a_tail_can_be_entered_unless_its_snake_may_eat_now(beans, free):
    """A snake in a ring of four cells, with its tail straight on, and a bean beside its head, or one cell off."""
    ways = ways_of_first({0: cells((5, 4), (6, 4), (6, 5), (5, 5))}, beans)
    assert ways[1][0] == free


def test_the_tail_of_a_snake_that_may_eat_is_in_the_way_of_others_too():
    snakes = {0: cells((5, 4), (5, 3), (5, 2)), 4: cells((3, 7), (4, 7), (5, 7), (5, 6), (5, 5))}
    assert ways_of_first(snakes, [])[1][0] == 1
    assert ways_of_first(snakes, cells((2, 7)))[1][0] == 0
    assert ways_of_first(snakes, cells((5, 8)))[1][0] == 1


def test_an_end_because_a_snake_found_no_place_can_be_looked_at():
    game = play(1, 30, 0.1, seed=5)
    game.boards.lengths[0, 1] = 0
    assert np.isfinite(see_boards(game.boards)).all()
