"""The references here are recorded games of the original, and `advance`, the rules once more on plain lists."""

from __future__ import annotations

import gzip
import json
import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from snakes.game import BEANS, CELLS, DOWN, LEFT, NONE, RIGHT, UP, Game
from snakes_boards import place

WAYS = [(-1, 0), (1, 0), (0, -1), (0, 1)]  # up, down, left, right
BACK = [1, 0, 3, 2]
FAR = [[100, 101, 102], [120, 121, 122], [140, 141, 142], [160, 161, 162], [180, 181, 182]]  # five that go left

# One more step of the original: two heads on a bean both die, and it is drawn anew in the cell where it was eaten
REDRAWN = {
    "start": {
        "bodies": [
            [[2, 4], [2, 3], [2, 2], [2, 1]],
            [[5, 3], [5, 4], [5, 5]],
            [[6, 3], [6, 4], [6, 5]],
            [[2, 6], [2, 7], [2, 8], [2, 9]],
            [[7, 3], [7, 4], [7, 5]],
            [[8, 3], [8, 4], [8, 5]],
        ],
        "beans": [[2, 5], [0, 9], [4, 12], [9, 17], [8, 0]],
        "headings": [RIGHT, *[LEFT] * 5],
    },
    "steps": [
        {
            "requested": [RIGHT, *[LEFT] * 5],
            "taken": [RIGHT, *[LEFT] * 5],
            "reward": [-1, 0, 0, -1, 0, 0],
            "died": [1, 0, 0, 1, 0, 0],
            "done": False,
            "bodies": [
                [[0, 1], [0, 0], [1, 0]],
                [[5, 2], [5, 3], [5, 4]],
                [[6, 2], [6, 3], [6, 4]],
                [[0, 3], [0, 2], [1, 2]],
                [[7, 2], [7, 3], [7, 4]],
                [[8, 2], [8, 3], [8, 4]],
            ],
            "beans": [[0, 9], [4, 12], [9, 17], [8, 0], [2, 5]],
            "headings": [RIGHT, LEFT, LEFT, RIGHT, LEFT, LEFT],
        }
    ],
}


def neighbour(cell, way):
    return (cell // 20 + WAYS[way][0]) % 10 * 20 + (cell % 20 + WAYS[way][1]) % 20


def birthplace(taken):
    """The body and heading of a snake that respawns among taken cells; None without a place."""
    free = [cell for cell in range(200) if cell not in taken]
    for start in free:
        queue, popped = [start], []
        while queue and len(popped) < 3:
            popped.append(queue.pop(0))
            around = [neighbour(popped[-1], way) for way in (3, 1, 0, 2)]
            queue += [cell for cell in around if cell in free and cell not in queue + popped]
        if len(popped) == 3:
            (row, column), *others = [divmod(cell, 20) for cell in popped]
            if sum(r == row for r, _ in others) == sum(c == column for _, c in others) == 1:  # the corner of an L
                popped[:2] = popped[1], popped[0]
            (row, column), (neck_row, neck_column) = divmod(popped[0], 20), divmod(popped[1], 20)
            if row == neck_row:
                return popped, RIGHT if column > neck_column else LEFT
            return popped, DOWN if row > neck_row else UP
    return None


def advance(bodies, beans, taken):
    """One step by the rules: new bodies and headings, the beans that are left, rewards and deaths."""
    bodies, beans, headings = [list(body) for body in bodies], list(beans), list(taken)
    before, ate = [len(body) for body in bodies], [0] * 6
    for s, body in enumerate(bodies):
        body.insert(0, neighbour(body[0], taken[s]))
        if body[0] in beans:
            beans.remove(body[0])
            ate[s] = 1
        else:
            body.pop()
    count = Counter(cell for body in bodies for cell in body)
    died = [count[body[0]] > 1 for body in bodies]
    rewards = [3 - before[s] if died[s] else ate[s] for s in range(6)]
    for s in range(6):
        bodies[s] = [] if died[s] else bodies[s]
    for s in range(6):
        if died[s]:
            bodies[s], headings[s] = birthplace({*beans, *(cell for body in bodies for cell in body)})
    return bodies, headings, beans, rewards, died


def flat(cells):
    return [20 * row + column for row, column in cells]


def not_reached(before, taken):
    """The beans that no head comes to in a step: an eaten one can be drawn anew in the same cell."""
    heads = [neighbour(flat(body)[0], way) for body, way in zip(before["bodies"], taken, strict=True)]
    return [cell for cell in flat(before["beans"]) if cell not in heads]


def put(game, state, time=0):
    place(game, 0, [flat(body) for body in state["bodies"]], state["headings"], flat(state["beans"]), time)


def beans(game, b=0):
    return [int(cell) for cell in game.boards.beans[b] if cell != NONE]


def state(game, b=0):
    """All that a step gives, but for the beans."""
    headings, rewards, died = game.boards.headings[b], game.rewards[b], game.died[b]
    return game.bodies(b), headings.tolist(), rewards.tolist(), died.tolist()


def step(game, actions):
    """Steps a game of one board; returns the directions taken."""
    actions = np.array([actions], np.uint8)
    game.step(actions)
    return actions[0].tolist()


def check_beans(game, left, b=0):
    """Five beans, those that were left among them, on free cells."""
    now, bodies = beans(game, b), game.bodies(b)
    assert len({*now}) == 5 and {*left} <= {*now} and not {*now} & {cell for body in bodies for cell in body}


def check_cells(game, b=0):
    expected = np.zeros(CELLS, int)
    np.add.at(expected, [cell for body in game.bodies(b) for cell in body], 1)
    expected[beans(game, b)] += 128
    assert game.boards.cells[b].tolist() == expected.tolist()


@pytest.fixture(scope="module")
def recorded():
    """Pairs of a state and the step that followed it, for each recorded game of the original."""
    path = os.environ.get("SNAKES_GAMES", Path(__file__).with_name("reference_games.json.gz"))
    with gzip.open(path) as file:
        games = [*json.load(file), REDRAWN]
    return [list(zip([game["start"], *game["steps"]], game["steps"], strict=False)) for game in games]


def expected(after):
    return (
        [flat(body) for body in after["bodies"]],
        after["headings"],
        after["reward"],
        [bool(x) for x in after["died"]],
    )


def test_every_step_of_the_original_follows_from_the_state_before(recorded):
    game = Game(1)
    for steps in recorded:
        for time, (before, after) in enumerate(steps):
            put(game, before, time)
            assert step(game, after["taken"]) == after["taken"]
            assert state(game) == expected(after)
            assert bool(game.done[0]) == after["done"]
            left = not_reached(before, after["taken"])
            assert {*left} <= {*flat(after["beans"])}
            check_beans(game, left)


def test_the_original_games_play_through_from_their_start(recorded):
    game = Game(1)
    for steps in recorded:
        put(game, steps[0][0])
        for _, after in steps:
            step(game, after["taken"])
            assert state(game) == expected(after)
            assert bool(game.done[0]) == after["done"]
            at = game.boards  # from here on with the beans that the original drew
            at.cells[0, beans(game)] = 0
            at.beans[0] = NONE
            at.beans[0, : len(after["beans"])] = flat(after["beans"])
            at.cells[0, beans(game)] = 128
        assert game.scores().tolist() == [
            [sum(map(len, after["bodies"][:3])) - 9, sum(map(len, after["bodies"][3:])) - 9]
        ]


def test_only_reversals_that_the_original_was_asked_for_are_changed(recorded):
    game = Game(1)
    for steps in recorded:
        for before, after in steps:
            put(game, before)
            taken = step(game, after["requested"])
            for s, (asked, got) in enumerate(zip(after["requested"], taken, strict=True)):
                reversal = asked == BACK[before["headings"][s]]
                assert (got != asked) == (after["taken"][s] != asked) == reversal
            bodies, headings, *_, died = advance(
                [flat(body) for body in before["bodies"]], flat(before["beans"]), taken
            )
            assert (game.bodies(0), game.boards.headings[0].tolist(), game.died[0].tolist()) == (bodies, headings, died)


def test_the_game_agrees_with_the_rules_on_plain_lists():
    """On two boards with random moves, and two where snakes graze and grow long."""
    game, rng, deaths, longest = Game(4, seed=5), np.random.default_rng(0), 0, 0
    for _ in range(1000):
        actions = rng.integers(0, 4, (4, 6), np.uint8)
        actions[2:] = _grazing(game, actions[2:])
        before = [(game.bodies(b), beans(game, b)) for b in range(4)]
        game.step(actions)
        for b, (bodies, meals) in enumerate(before):
            bodies, headings, left, rewards, died = advance(bodies, meals, actions[b].tolist())
            assert state(game, b) == (bodies, headings, rewards, died)
            check_beans(game, left, b)
            check_cells(game, b)
            deaths, longest = deaths + sum(died), max(longest, *map(len, bodies))
        game.reset(game.done)
    assert deaths > 500 and longest > 12


def _grazing(game, actions):
    """On boards 2 and 3: to a bean beside the head, else to a free cell, else the action given."""
    for b, row in enumerate(actions, start=2):
        cells = game.boards.cells[b]
        for s, body in enumerate(game.bodies(b)):
            cells_around = [cells[neighbour(body[0], way)] for way in range(4)]
            ways = [way for way in range(4) if cells_around[way] == 128] or [w for w in range(4) if not cells_around[w]]
            row[s] = row[s] if row[s] in ways else (ways or row[s : s + 1])[0]
    return actions


def on_board(bodies, meals=(), *, headings=None, moves=None, time=0, episode_length=200):
    """A game after one step from a state of our own, filled up with snakes of FAR that go left."""
    rest = 6 - len(bodies)
    headings = [*(headings or []), *[LEFT] * 6][:6]
    game = Game(1, episode_length=episode_length)
    place(game, 0, [*bodies, *FAR[:rest]], headings, meals, time)
    step(game, [*(moves or []), *[LEFT] * 6][:6])
    check_cells(game)
    return game


def test_of_two_heads_on_a_bean_the_lower_eats_and_both_die():
    game = on_board([[44, 43, 42, 41], [46, 47, 48]], [45], headings=[RIGHT, LEFT], moves=[RIGHT, LEFT])
    assert game.died[0].tolist() == [True, True, *[False] * 4]
    assert game.rewards[0].tolist() == [-1, 0, 0, 0, 0, 0]  # 3 - 4, and the bean is not counted
    assert 45 not in game.bodies(0)[0] + game.bodies(0)[1]
    assert game.boards.lengths[0].tolist() == [3] * 6


@pytest.mark.parametrize(("tail", "dies"), [(41, True), (49, False)], ids=["lower", "higher"])
def test_of_two_heads_on_a_bean_the_lower_leaves_its_tail_in_the_way(tail, dies):
    third = [tail - 20, tail - 19, tail - 18]  # above a tail, which it enters from there
    bodies = [[44, 43, 42, 41], [46, 47, 48, 49], third]
    game = on_board(bodies, [45], headings=[RIGHT, LEFT, LEFT], moves=[RIGHT, LEFT, DOWN])
    assert game.died[0].tolist() == [True, True, dies, False, False, False]


def test_a_tail_that_leaves_may_be_entered_and_one_that_stays_kills():
    follower, leader = [44, 64, 84], [42, 43, 23, 24]  # leader's tail is above the follower's head
    assert not on_board([follower, leader], headings=[UP, LEFT], moves=[UP, LEFT]).died.any()
    game = on_board([follower, leader], [41], headings=[UP, LEFT], moves=[UP, LEFT])
    assert game.died[0].tolist() == [True, *[False] * 5]
    assert game.rewards[0].tolist() == [0, 1, 0, 0, 0, 0]


def test_a_snake_may_follow_its_own_tail():
    game = on_board([[22, 23, 43, 42]], headings=[LEFT], moves=[DOWN])
    assert game.bodies(0)[0] == [42, 22, 23, 43]


def test_a_snake_dies_on_its_own_body_and_loses_all_it_gained():
    game = on_board([[22, 23, 43, 42, 41]], headings=[LEFT], moves=[DOWN])
    assert game.died[0, 0] and game.rewards[0, 0] == -2


def test_neighbours_that_swap_heads_both_die():
    game = on_board([[44, 43, 42], [45, 46, 47, 48]], headings=[RIGHT, LEFT], moves=[RIGHT, LEFT])
    assert game.died[0].tolist() == [True, True, *[False] * 4]
    assert game.rewards[0].tolist() == [0, -1, 0, 0, 0, 0]  # at length 3 there is nothing to lose


def test_three_heads_on_a_cell_all_die():
    game = on_board([[44, 43, 42], [46, 47, 48], [65, 85, 84]], headings=[RIGHT, LEFT, UP], moves=[RIGHT, LEFT, UP])
    assert game.died[0].tolist() == [True, True, True, *[False] * 3]


def test_who_is_hit_is_not_hurt():
    game = on_board([[65, 85, 84], [44, 45, 46, 47]], headings=[UP, LEFT], moves=[UP, LEFT])
    assert game.died[0].tolist() == [True, *[False] * 5]


def test_a_head_goes_on_across_the_border():
    game = on_board([[15, 35, 55]], headings=[UP], moves=[UP])
    assert game.bodies(0)[0] == [195, 15, 35]
    game = on_board([[39, 38, 37]], headings=[RIGHT], moves=[RIGHT])
    assert game.bodies(0)[0] == [20, 39, 38]


def test_the_dead_come_back_in_turn_in_the_first_places():
    game = on_board([[44, 43, 42], [46, 47, 48]], headings=[RIGHT, LEFT], moves=[RIGHT, LEFT])
    assert game.bodies(0)[:2] == [[1, 0, 20], [3, 2, 22]]
    assert game.boards.headings[0, :2].tolist() == [RIGHT, RIGHT]


def pack(first, free):
    """Bodies that leave only some cells free; all but the first can go right, to where their own tail is."""
    small = [[cell, cell + 2, cell + 1] for cell in (143, 146, 149, 152)]
    taken = {*first, *free, 140, 141, *(cell for body in small for cell in body)}
    return [first, [140, *({*range(CELLS)} - taken), 141], *small]


# the cells that are free, and the body and heading of the snake that comes back there
PLACES = {
    "a pocket of two is passed over": ([0, 1, 43, 44, 45], [43, 44, 45], LEFT),
    "a bend that is not its start": ([0, 1, 21], [0, 1, 21], LEFT),
    "a corner becomes the neck": ([28, 29, 48], [29, 28, 48], RIGHT),
    "a corner across two borders, heading into the neck": ([0, 19, 180], [180, 0, 19], DOWN),
    "the middle of a row is the head": ([0, 1, 19], [0, 1, 19], LEFT),
    "the middle of a column is the head": ([5, 25, 185], [5, 25, 185], UP),
    "a row across the border, heading into the neck": ([0, 18, 19], [0, 19, 18], LEFT),
}


@pytest.mark.parametrize("place", PLACES)
def test_the_dead_come_back_in_small_places_too(place):
    free, body, heading = PLACES[place]
    game = on_board(pack([104, 108, 112], free), headings=[RIGHT] * 6, moves=[RIGHT] * 6)
    assert game.died[0].tolist() == [True, *[False] * 5]
    assert (game.bodies(0)[0], game.boards.headings[0, 0]) == (body, heading)


def test_a_dead_snake_without_a_place_ends_the_episode():
    free = range(120, 140, 2)
    game = on_board(pack([0, 45, 90], free), headings=[RIGHT] * 6, moves=[RIGHT] * 6)
    assert game.done[0] and game.bodies(0)[0] == []


def test_an_episode_ends_when_snakes_and_beans_no_longer_fit():
    bodies, free = pack([0, 40, 20], [1, 50, 90, 130, 170]), [1, 50, 90, 130, 170]
    assert sum(map(len, bodies)) == 195
    game = on_board(bodies, [1], headings=[RIGHT] * 6, moves=[DOWN, *[RIGHT] * 5])  # along its own tail
    assert not game.done[0] and sorted(beans(game)) == free
    assert on_board(bodies, [1], headings=[RIGHT] * 6, moves=[RIGHT] * 6).done[0]


def test_an_episode_ends_after_its_length():
    game, done = Game(2, episode_length=7), []
    for _ in range(8):
        game.step(np.zeros((2, 6), np.uint8))
        done.append(game.done.tolist())
        game.reset(game.done & [True, False])
    assert done == [[False] * 2] * 6 + [[True] * 2] + [[False, True]]
    assert game.boards.times.tolist() == [1, 8]


def test_a_reversal_is_judged_by_the_stored_heading_not_by_the_neck():
    for seed in range(20):
        game = Game(1, seed)
        place(game, 0, [[0, 19, 18], *FAR], [LEFT] * 6, [])
        assert step(game, [RIGHT, *[LEFT] * 5])[0] in (UP, DOWN, LEFT)
    place(game, 0, [[0, 19, 18], *FAR], [LEFT] * 6, [])
    assert step(game, [LEFT] * 6)[0] == LEFT and game.died[0, 0]  # into its own neck


def starts(count, seed):
    """The first bodies, shape (count, 6, 3), headings and beans of many episodes."""
    game, found = Game(1000, seed), []
    for _ in range(count // 1000):
        game.reset()
        found.append((game.boards.bodies[:, :, :3].copy(), game.boards.headings.copy(), game.boards.beans.copy()))
    return [np.concatenate(each).astype(int) for each in zip(*found, strict=True)]


def are_alike(counts):
    """Whether counts differ by chance alone."""
    from scipy.stats import chisquare  # which takes a second to import

    return chisquare(counts).pvalue > 0.001


def is_uniform(outcomes, kinds):
    return are_alike(np.bincount(np.ravel(outcomes), minlength=kinds))


def test_starts_are_straight_uniform_and_do_not_overlap():
    bodies, headings, meals = starts(40_000, seed=1)
    ahead = np.array([[neighbour(cell, way) for way in range(4)] for cell in range(CELLS)])
    assert (ahead[bodies[:, :, 1:], headings[:, :, None]] == bodies[:, :, :2]).all()
    cells = np.sort(np.concatenate([bodies.reshape(-1, 18), meals], 1))
    assert (np.diff(cells) > 0).all()
    assert is_uniform(4 * bodies[:, 0, 0] + headings[:, 0], 800)  # the others also keep clear of those before
    assert all(is_uniform(bodies[:, s, 0], CELLS) for s in range(6))
    assert all(is_uniform(meals[:, i], CELLS) for i in range(BEANS))


def test_a_reversal_becomes_each_other_direction_equally_often():
    game, taken = Game(1000, seed=2), []
    for _ in range(10):
        game.reset()
        before = game.boards.headings.astype(int)
        actions = np.array(BACK, np.uint8)[before]
        game.step(actions)
        taken.append(4 * before + actions)
    for heading in range(4):
        counts = np.bincount(np.ravel(taken), minlength=16)[4 * heading :][:4]
        assert counts[BACK[heading]] == 0
        assert are_alike(np.delete(counts, BACK[heading]))


def test_beans_are_drawn_uniformly_from_the_free_cells():
    game = Game(5000, seed=3)
    place(game, 0, [[44, 43, 42], *FAR], [RIGHT, *[LEFT] * 5], [7, 8])
    for array in game.boards[:-1]:  # the same state on all boards, but for the random streams
        array[:] = array[0]
    game.step(np.full((5000, 6), LEFT, np.uint8) - np.array([LEFT, 0, 0, 0, 0, 0], np.uint8))  # the first goes up
    taken = {cell for body in game.bodies(0) for cell in body} | {7, 8}
    drawn = np.bincount(np.ravel(game.boards.beans), minlength=CELLS)
    assert drawn[7] == drawn[8] == 5000
    free = [cell for cell in range(CELLS) if cell not in taken]
    assert drawn[free].sum() == 3 * 5000 and are_alike(drawn[free])


def test_a_game_depends_on_seed_and_board_number_alone():
    whole, parts = Game(6, seed=4), [Game(2, seed=4), Game(4, seed=4, first=2)]
    rng = np.random.default_rng(0)
    for _ in range(300):
        actions = rng.integers(0, 4, (6, 6), np.uint8)
        halves = [actions[:2].copy(), actions[2:].copy()]
        whole.step(actions)
        whole.reset(whole.done)
        for game, half in zip(parts, halves, strict=True):
            game.step(half)
            game.reset(game.done)
        assert (actions == np.concatenate(halves)).all()
        assert [whole.bodies(b) for b in range(6)] == [game.bodies(b) for game in parts for b in range(len(game.done))]
        assert (whole.boards.beans == np.concatenate([game.boards.beans for game in parts])).all()
    assert len({str(Game(1, seed, first=first).bodies(0)) for seed in range(5) for first in range(5)}) == 25


def test_impossible_settings_and_actions_are_refused():
    for wrong in ({"count": 0}, {"count": 1, "episode_length": 0}):
        with pytest.raises(ValueError, match="at least 1"):
            Game(**wrong)
    game = Game(1)
    for wrong in (np.zeros((2, 6), np.uint8), np.zeros((1, 6), int)):
        with pytest.raises(ValueError, match="uint8 of shape"):
            game.step(wrong)
