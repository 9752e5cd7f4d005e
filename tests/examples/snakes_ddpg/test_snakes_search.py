"""Search: what it values, when it leaves the actor's way, and that it foresees no new beans."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from player import search as search_module
from player import submission_template
from player.search import (
    DOUBT,
    GAMMA,
    LAMBDA,
    LIKELY,
    LIMIT,
    MARGIN,
    NEAR,
    PLACES,
    TRAP,
    Distilled,
    Search,
    escape,
    load_player,
    search_of,
)
from player.student import Value
from player.submission_template import distance
from player.submission_template import escape as escape_of_submission
from snakes.ddpg import Actor, Critic, Policy
from snakes.features import DIRECTION, FEATURES, observe
from snakes.game import BEAN, LEFT, NEXT, NONE, RIGHT, SNAKES, Boards, Game, foresee
from snakes_boards import crowded, place
from torch import nn

pytestmark = pytest.mark.storm  # it plays, and compiles what it plays with


def of_strong_opinions(network: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in network.parameters():
            parameter *= 3
    return network


def make_search(kind: str) -> Search:
    torch.manual_seed(3)
    actor = of_strong_opinions(Actor(16))
    if kind == "plain":
        return search_of(actor, of_strong_opinions(Critic(16)), depth=3)
    return Search(actor, of_strong_opinions(Actor(16)), of_strong_opinions(Value(16)), depth=3)


@pytest.fixture(scope="module", params=["plain", "distilled"])
def search(request: pytest.FixtureRequest) -> Search:
    return make_search(request.param)


def played(count: int, steps: int) -> Game:
    game, rng = Game(count, seed=1), np.random.default_rng(1)
    for _ in range(steps):
        game.step(rng.integers(0, 4, (count, 6), dtype=np.uint8))
    return game


def looks(search: Search, boards: Boards, team: int) -> tuple[np.ndarray, float]:
    """The logits of all snakes' ways on one board, (6, 3), and what is expected of a team."""
    seen = np.empty((2, 1, 3, FEATURES), np.float32)
    observe(boards, 0, seen[0])
    observe(boards, 1, seen[1])
    with torch.no_grad():
        rows = torch.from_numpy(seen.reshape(6, FEATURES))
        own, others = (rows[3 * side : 3 * side + 3] for side in (team, 1 - team))
        if isinstance(search.value, Value):
            expected = float(search.value(torch.cat([own, others])[None]))
        else:
            expected = sum(float(search.actor(row) @ search.value.critic(row)) for row in own) / 3
        networks = [search.actor if s // 3 == team else search.rivals for s in range(6)]
        logits = [network.layers(row).numpy() for network, row in zip(networks, rows, strict=True)]
        return np.stack(logits), expected


def free_ways(boards: Boards) -> np.ndarray:
    """Tell which ways of each snake of one board lead to a free cell: (6, 3)."""
    seen = np.empty((2, 1, 3, FEATURES), np.float32)
    observe(boards, 0, seen[0])
    observe(boards, 1, seen[1])
    return seen.reshape(6, FEATURES)[:, [0, 13, 26]] > 0


def play_on(search: Search, game: Game, team: int, b: int, ways: list[int]) -> float:
    """A board's value, by a game of its own: the mean of what n steps and then the critic say, for all n."""
    after = Game(1)
    for array, of_all in zip(after.boards, game.boards, strict=True):
        array[0] = of_all[b]
    own, others = np.r_[3 * team : 3 * team + 3], np.r_[3 - 3 * team : 6 - 3 * team]
    gained, lost, answers = 0.0, 0.0, []
    for step in range(search.depth):
        before = after.boards.lengths[0].astype(int)
        rewards, died = np.zeros((1, 6), np.int16), np.zeros((1, 6), np.bool_)
        foresee(after.boards, DIRECTION[after.boards.headings, [ways]], rewards, died)
        if step == 0:
            bodies = after.bodies(0)
            lost = sum((len(bodies[s]) - 3) * (1 - escape_of_submission(bodies, s) / LIMIT) for s in own)
        gains = after.boards.lengths[0].astype(int) - before
        gained += GAMMA**step * (gains[own].sum() - gains[others].sum())
        logits, expected = looks(search, after.boards, team)
        answers.append(gained + GAMMA ** (step + 1) * expected)
        ways = logits.argmax(1).tolist()
    weights = [(1 - LAMBDA) * LAMBDA**step for step in range(search.depth)]
    weights[-1] /= 1 - LAMBDA
    return float(np.dot(weights, answers)) - TRAP * lost


def value(search: Search, game: Game, s: int, b: int, ways: list[int]) -> float:
    """A board's value for the choice of a snake, with one rival near it at a time that takes another way."""
    team = s // 3
    heads = [body[0] for body in game.bodies(b)]
    logits, _ = looks(search, Boards(*(array[b : b + 1] for array in game.boards)), team)
    plain = play_on(search, game, team, b, ways)
    total = plain
    for rival in np.r_[3 - 3 * team : 6 - 3 * team]:
        if distance(heads[s], heads[rival]) > NEAR:
            continue
        chances = np.exp(logits[rival]) / np.exp(logits[rival]).sum()
        for way in np.flatnonzero(chances > LIKELY):
            other = play_on(search, game, team, b, [*ways[:rival], int(way), *ways[rival + 1 :]])
            total += chances[way] * (other - plain)
    return total


@pytest.mark.parametrize("team", [0, 1])
def test_a_team_leaves_the_actors_ways_for_better_ones_in_turn(search: Search, team: int) -> None:
    game = played(20, 60)
    actions = np.full((20, 6), 7, np.uint8)
    search(game.boards, team, actions)
    plain = np.zeros((20, 6), np.uint8)
    Policy(search.actor)(game.boards, team, plain)
    Policy(search.rivals)(game.boards, 1 - team, plain)
    changed = 0
    for b in range(20):
        free = free_ways(Boards(*(array[b : b + 1] for array in game.boards)))
        headings = game.boards.headings[b]
        ways = [DIRECTION[headings[s]].tolist().index(plain[b, s]) for s in range(6)]
        for s in range(3 * team, 3 * team + 3):
            values = [value(search, game, s, b, [*ways[:s], way, *ways[s + 1 :]]) for way in range(3)]
            values[ways[s]] += MARGIN
            for way in range(3):
                if not free[s][way] and way != ways[s]:
                    values[way] = -np.inf
            changed += ways[s] != int(np.argmax(values))
            ways[s] = int(np.argmax(values))
        wanted = DIRECTION[headings, ways]
        assert (actions[b, 3 * team : 3 * team + 3] == wanted[3 * team : 3 * team + 3]).all()
    assert changed > 5
    assert (np.delete(actions, np.r_[3 * team : 3 * team + 3], axis=1) == 7).all()


def test_a_search_changes_neither_boards_nor_their_streams(search: Search) -> None:
    game = played(5, 30)
    before = [array.copy() for array in game.boards]
    search(game.boards, 0, np.zeros((5, 6), np.uint8))
    for now, then in zip(game.boards, before, strict=True):
        np.testing.assert_array_equal(now, then)


def test_what_is_foreseen_has_no_new_beans() -> None:
    game = Game(1)
    bodies = [[20 * row + column for column in (5, 6, 7)] for row in range(6)]
    place(game, 0, bodies, [LEFT] * 6, [4, 100, 120, 140, 160])
    rewards, died = np.zeros((1, 6), np.int16), np.zeros((1, 6), np.bool_)
    foresee(game.boards, np.full((1, 6), LEFT, np.uint8), rewards, died)
    assert rewards[0, 0] == 1 and game.boards.beans[0, 0] == NONE
    assert (game.boards.cells[0] >= BEAN).sum() == (game.boards.beans[0] != NONE).sum() < 5


def test_rivals_that_nobody_has_watched_go_as_the_actor_but_less_surely() -> None:
    search = make_search("plain")
    seen = torch.randn(50, FEATURES)
    torch.testing.assert_close(search.rivals.layers(seen) * DOUBT, search.actor.layers(seen))


def test_a_search_is_loaded_from_an_actor_and_the_critic_beside_it(tmp_path: Path) -> None:
    search = make_search("plain")
    torch.save(search.actor.state_dict(), tmp_path / "actor_best.pth")
    with pytest.raises(FileNotFoundError, match="critic_best.pth"):
        load_player(tmp_path / "actor_best.pth")
    torch.save(search.value.critic.state_dict(), tmp_path / "critic_best.pth")
    game = played(10, 40)
    actions = np.zeros((2, 10, 6), np.uint8)
    search(game.boards, 0, actions[0])
    load_player(tmp_path / "actor_best.pth", depth=3)(game.boards, 0, actions[1])
    np.testing.assert_array_equal(actions[0], actions[1])


def test_a_search_of_a_distilled_model_is_loaded_from_its_file(tmp_path: Path) -> None:
    torch.manual_seed(0)
    whole = of_strong_opinions(Distilled(16))
    torch.save(whole.state_dict(), tmp_path / "actor_distilled.pth")
    game = played(10, 40)
    actions = np.zeros((2, 10, 6), np.uint8)
    learners = whole["learners"]
    Search(whole["actor"], learners.rivals, learners.value, depth=2)(game.boards, 1, actions[0])
    load_player(tmp_path / "actor_distilled.pth", depth=2)(game.boards, 1, actions[1])
    np.testing.assert_array_equal(actions[0], actions[1])


def test_a_search_looks_at_least_a_step_ahead(search: Search) -> None:
    with pytest.raises(ValueError, match="at least one step ahead, not -1"):
        Search(search.actor, search.rivals, search.value, depth=-1)


def test_a_submission_searches_with_the_same_constants() -> None:
    for name in ("GAMMA", "LAMBDA", "NEAR", "LIKELY", "TRAP", "MARGIN", "LIMIT", "PLACES"):
        assert getattr(submission_template, name) == getattr(search_module, name)


# How long a snake can go on, compiled and as the submission finds it, against a game that is played on


def steps_of(game: Game) -> np.ndarray:
    """The steps of all snakes, (n, 6)."""
    steps = np.zeros((2, len(game.done), 3))
    escape(game.boards, 0, steps[0])
    escape(game.boards, 1, steps[1])
    return np.concatenate(steps, axis=1)


def live_on(bodies: list[list[int]], s: int, closed: set[int], steps: int, tries: list[int]) -> int:
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
            longest = max(longest, live_on(moved, s, closed, steps + 1, tries))
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
            wanted = live_on(bodies, s, set(NEXT[heads].reshape(-1).tolist()), 0, tries)
            assert escape_of_submission(bodies, s) == steps[b, s]
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
