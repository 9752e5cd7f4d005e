"""The submission plays as the model it was made of, with NumPy alone, on what the original game tells its players."""

from __future__ import annotations

import ast
import gzip
import itertools
import json
import math
import pickle
import re
import runpy
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import export
import numpy as np
import player.submission_template as template
import pytest
import torch
from player.search import Search, search_of
from shared.program import UserError
from snakes.ddpg import Actor, Critic, Policy
from snakes.features import DIRECTION, FEATURES, observe
from snakes.game import NEXT, OPPOSITE, SNAKES, Game
from snakes.opponents import OPPONENTS
from snakes_boards import crowded, place

pytestmark = pytest.mark.storm  # the first time, compiling the players takes half a minute

GAMES = Path(__file__).with_name("reference_games.json.gz")
NAMES = ["up", "down", "left", "right"]
# Runs a submission on recorded observations, far from the project's files and from all that is heavy
ALONE = """
import json, pickle, re, runpy, sys, time
sys.modules.update(dict.fromkeys(["torch", "numba", "ddpkit", "snakes"]))  # importing these fails
start = time.thread_time()
controller = runpy.run_path(sys.argv[1])["my_controller"]
moves, seconds = [], []
with open(sys.argv[2], "rb") as file:
    for observation in pickle.load(file):
        moves.append(controller(observation, None, False))
        seconds.append(time.thread_time() - start)
        start = time.thread_time()
with open("/proc/self/status") as file:
    kilobytes = int(re.search(r"VmHWM:\\s+(\\d+) kB", file.read())[1])
print(json.dumps([moves, seconds, kilobytes / 1000]))
"""


@pytest.fixture(scope="module")
def policy() -> Iterator[Search]:
    """Untrained, but of strong opinions on all that it sees."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # one state at a time is not worth a second one, which waits for others' processes
    torch.manual_seed(5)
    networks = Actor(hidden=32), Critic(hidden=32)
    with torch.no_grad():
        for parameter in torch.nn.ModuleList(networks).parameters():
            parameter *= 3
    yield search_of(*networks, depth=2)
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model(policy: Search, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "actor_1.pth"
    torch.save(policy.actor.state_dict(), path)
    torch.save(policy.value.critic.state_dict(), path.with_name("critic_1.pth"))
    return path


@pytest.fixture(scope="module")
def submission(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("submission") / "submission.py"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export, "CHECKED", 10)  # the tests below ask it for many more moves
        export.main(Namespace(model=str(model), runs_folder=path.parent, output=path, depth=2, seconds=math.inf))
    return path


@pytest.fixture(scope="module")
def recorded() -> list[list[dict[str, Any]]]:
    """The states of whole games of the original: bodies and beans as [row, column], and headings."""
    with gzip.open(GAMES) as file:
        return [[game["start"], *game["steps"]] for game in json.load(file)]


def ask(state: dict[str, Any], before: dict[str, Any] | None, s: int) -> dict[Any, Any]:
    """Make the observation of a snake with the original's keys and types, which for beans are NumPy's integers.

    The last directions are the headings of the state before.
    """
    last = None if before is None else [NAMES[heading] for heading in before["headings"]]
    return {
        1: [list(cell) for cell in np.array(state["beans"], np.int64).reshape(-1, 2)],
        **{2 + i: [list(cell) for cell in body] for i, body in enumerate(state["bodies"])},
        "board_width": 20,
        "board_height": 10,
        "last_direction": last,
        "controlled_snake_index": 2 + s,
    }


def numbers(cells: list[list[int]]) -> list[int]:
    return [20 * row + column for row, column in cells]


def put(states: list[dict[str, Any]]) -> Game:
    """A game with a board for each state."""
    game = Game(len(states))
    for b, state in enumerate(states):
        place(game, b, [numbers(body) for body in state["bodies"]], state["headings"], numbers(state["beans"]))
    return game


def wanted(policy: Policy, game: Game) -> np.ndarray:
    """The moves of both teams, (n, 6)."""
    actions = np.zeros((len(game.done), SNAKES), np.uint8)
    policy(game.boards, 0, actions)
    policy(game.boards, 1, actions)
    return actions


def assert_looks_as_compiled(game: Game) -> None:
    seen = np.empty((2, len(game.done), 3, FEATURES), np.float32)
    observe(game.boards, 0, seen[0])
    observe(game.boards, 1, seen[1])
    for b in range(len(game.done)):
        bodies, beans = game.bodies(b), [int(bean) for bean in game.boards.beans[b] if bean != 255]
        for s in range(SNAKES):
            looked = template.look(bodies, beans, s, int(game.boards.headings[b, s]))
            assert np.array_equal(np.array(looked, np.float32), seen[s // 3, b, s % 3])


@pytest.mark.parametrize("name", ["random", "greedy"])
def test_a_submission_sees_what_the_compiled_features_show_all_through_a_game(name):
    game, actions = Game(2, seed=3, episode_length=100), np.zeros((2, SNAKES), np.uint8)
    deaths = 0
    while not game.done[0]:
        assert_looks_as_compiled(game)
        OPPONENTS[name](game.boards, 0, actions)
        OPPONENTS[name](game.boards, 1, actions)
        game.step(actions)
        deaths += game.died.sum()
    assert deaths > 10


def test_long_snakes_and_few_beans_look_alike_too():
    game = crowded(100, beans=5)
    assert np.mean(game.boards.lengths) > 12
    assert_looks_as_compiled(game)


def test_headings_are_found_in_all_states_of_the_original(recorded):
    into_the_neck = 0
    for states in recorded:
        for before, state in zip([None, *states], states, strict=False):
            for s, body in enumerate(map(numbers, state["bodies"])):
                heading = template.find_heading(body, before and numbers(before["bodies"][s]))
                assert heading == state["headings"][s]
                into_the_neck += NEXT[body[0], heading] == body[1]
    assert into_the_neck > 5  # put back after a death, across the border


@pytest.mark.storm
def test_a_plain_submission_plays_as_the_actor_alone(policy, model, tmp_path):
    path = tmp_path / "submission.py"
    export.main(Namespace(model=str(model), runs_folder=tmp_path, output=path, depth=0, seconds=0.5))
    assert "\nCRITIC = unpack" not in path.read_text()
    export.check(path, Policy(policy.actor))
    with pytest.raises(ValueError, match="are not the model's"):
        export.check(path, policy)


@pytest.mark.parametrize("name", ["random", "greedy"])
def test_a_step_is_foreseen_as_the_game_plays_it_but_for_new_beans(name):
    game, actions = Game(6, seed=3), np.zeros((6, SNAKES), np.uint8)
    deaths = eaten = 0
    for _ in range(120):
        for team in (0, 1):
            OPPONENTS[name](game.boards, team, actions)
        actions[actions == OPPOSITE[game.boards.headings]] = 0
        actions[actions == OPPOSITE[game.boards.headings]] = 2
        told = [(game.bodies(b), game.boards.beans[b].tolist()) for b in range(6)]
        foreseen = [template.foresee(*board, row) for board, row in zip(told, actions.tolist(), strict=True)]
        game.step(actions)
        for b, (bodies, headings, beans, gains) in enumerate(foreseen):
            assert bodies == game.bodies(b) and headings == game.boards.headings[b].tolist()
            assert gains == game.rewards[b].tolist()
            assert {*beans} <= {*game.boards.beans[b].tolist()}
            eaten += len(told[b][1]) - len(beans)
        deaths += game.died.sum()
    assert deaths > 50 and eaten > 50


@pytest.mark.storm
def test_a_submission_alone_in_a_process_moves_as_the_policy(submission, policy, recorded, tmp_path):
    observations, moves = [], []
    games = [states[:30] for states in recorded[:2]]
    for states in games:  # one after the other in the same process
        states = [{**state, "beans": state["beans"][: b % 11]} for b, state in enumerate(states)]
        befores = [None, *states[:-1]]
        observations += [ask(*pair, s) for pair in zip(states, befores, strict=True) for s in range(SNAKES)]
        moves += wanted(policy, put(states)).reshape(-1).tolist()

    (tmp_path / "observations").write_bytes(pickle.dumps(observations))
    command = [sys.executable, "-I", "-c", ALONE, submission, tmp_path / "observations"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stderr) == (0, "")
    played, seconds, megabytes = json.loads(done.stdout)
    assert played == np.eye(4, dtype=int)[moves][:, None].tolist()
    # the platform allows 2 s, which the first call may need, and 500 MB; of the CPU's time, as this machine is not idle
    assert max(seconds) < 2 and megabytes < 200
    assert np.median(seconds) < 0.02  # of three calls in a step the first one searches

    headings = [heading for states in games for state in states for heading in state["headings"]]
    ways = np.argmax(DIRECTION[headings] == np.array(moves)[:, None], axis=1)
    assert min(np.bincount(ways)) > 30  # the policy goes all ways


@pytest.mark.parametrize("team", [0, pytest.param(1, marks=pytest.mark.storm)])
def test_a_submission_plays_games_of_ours_as_the_policy(submission, policy, team):
    player = runpy.run_path(str(submission))
    game, actions = Game(1, seed=6, episode_length=30), np.zeros((1, SNAKES), np.uint8)
    differ = 0  # where a rival was put back just as if it had moved across the border, its heading cannot be known
    for _ in range(2):  # the second starts over in the same process
        before = None
        while before is None or not game.done[0]:
            OPPONENTS["random"](game.boards, 1 - team, actions)
            told = export.observations(game, 0, before)
            for s in range(3 * team, 3 * team + 3):
                actions[0, s] = player["my_controller"](told[s], None, False)[0].index(1)
            differ += (actions[:, 3 * team :][:, :3] != wanted(policy, game)[:, 3 * team :][:, :3]).sum()
            before = game.boards.headings[0].copy()
            game.step(actions)
        game.reset()
    assert player["failures"] == {} and differ <= 2


@pytest.fixture
def player(submission: Path) -> dict[str, Any]:
    """What a submission's functions have as their globals, which a test can change."""
    return runpy.run_path(str(submission))["my_controller"].__globals__


def moves_of(player: dict[str, Any], states: list[dict[str, Any]]) -> list[list[int]]:
    """The moves of all snakes in each state, of which the first is a game's."""
    controller, moves = player["my_controller"], []
    for before, state in zip([None, *states], states, strict=False):
        moves.append([controller(ask(state, before, s), None, False)[0].index(1) for s in range(SNAKES)])
    return moves


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_search_that_is_cut_off_answers_as_one_of_so_many_steps(player, policy, recorded, steps):
    whole, states = player["play_on"], recorded[0][1:9]
    player.update(play_on=lambda *board: itertools.islice(whole(*board), steps), STEPS=6)
    cut = search_of(policy.actor, policy.value.critic, depth=steps) if steps else Policy(policy.actor)
    assert moves_of(player, states) == wanted(cut, put(states)).tolist()


@pytest.mark.parametrize("takes", [0.02, 0.1, 2.0])
def test_a_search_ends_in_time_however_long_a_step_of_it_takes(player, recorded, takes):
    """By a clock that goes on with each step that is foreseen."""
    clock, foresee = [0.0], player["foresee"]

    def foresee_slowly(*board: Any) -> Any:
        clock[0] += takes
        return foresee(*board)

    player.update(foresee=foresee_slowly, time=Namespace(monotonic=lambda: clock[0]), STEPS=6, SECONDS=0.5)
    moves_of(player, recorded[0][:2])
    # the first state of a game is planned for each snake, the second for each team; a step may end after its time
    assert 8 * 0.5 <= clock[0] <= 8 * (0.5 + takes) + 1e-9


def types(value: Any) -> Any:
    """The types of a value and of all that it holds."""
    if isinstance(value, dict):
        return {key: types(held) for key, held in value.items()}
    if isinstance(value, list):
        return [types(held) for held in value]
    return type(value)


def test_observations_are_made_as_the_original_makes_them_to_the_type(recorded):
    first, second = recorded[0][:2]
    game = put([first, second])
    made = export.observations(game, 0, None), export.observations(game, 1, np.array(first["headings"]))
    wanted = [ask(first, None, s) for s in range(SNAKES)], [ask(second, first, s) for s in range(SNAKES)]
    assert made == wanted and types([*made]) == types([*wanted])
    assert types(made[1][0])[1] == [[np.int64, np.int64]] * 5


KINDS = {
    **{kind.__name__: kind for kind in (np.int8, np.uint8, np.int16, np.int32, np.uint32, np.uint64)},
    "scalar array": np.array,
    "tensor": torch.tensor,
}
SEQUENCES = {"lists": list, "tuples": tuple, "arrays": np.array}


def dress(told: dict[Any, Any], kind: Callable[[int], Any], sequence: Callable[[list[Any]], Any]) -> dict[Any, Any]:
    """An observation with other integers and sequences in every place."""

    def change(value: Any) -> Any:
        if isinstance(value, (int, np.integer)):
            return kind(int(value))
        return sequence([change(held) for held in value]) if isinstance(value, list) else value

    return {key: change(value) for key, value in told.items()}


@pytest.mark.parametrize("sequence", SEQUENCES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_submission_takes_all_integers_and_sequences_in_every_place(submission, policy, recorded, kind, sequence):
    player, states = runpy.run_path(str(submission)), recorded[1][:4]
    moves = wanted(policy, put(states))
    for before, state, row in zip([None, *states], states, moves, strict=False):
        for s in range(SNAKES):
            told = dress(ask(state, before, s), KINDS[kind], SEQUENCES[sequence])
            assert player["my_controller"](told, None, False) == [np.eye(4)[row[s]].tolist()]
    assert player["failures"] == {}


def test_a_move_is_a_list_of_pythons_integers_which_the_original_looks_for_a_one_in(submission, recorded):
    move = runpy.run_path(str(submission))["my_controller"](ask(recorded[0][0], None, 0), None, False)
    assert types(move) == [[int] * 4]


def test_a_submission_neither_changes_the_originals_lists_nor_relies_on_them_later(submission, policy, recorded):
    """They are the game itself: all players are handed the same ones, and the next step changes them."""
    controller, states = runpy.run_path(str(submission))["my_controller"], recorded[0][:40]
    moves = wanted(policy, put(states))
    for before, state, row in zip([None, *states], states, moves, strict=False):
        for s in range(SNAKES):
            told, same = ask(state, before, s), ask(state, before, s)
            assert controller(told, None, False)[0][row[s]] == 1
            assert told == same
            for key in range(1, 8):
                told[key].clear()


def state_with(body: list[list[int]], heading: int = 0) -> dict[str, Any]:
    """A state in which snake 0 has a body, and the others lie in columns 10 to 14."""
    bodies = [body, *([[row, column] for row in (3, 4, 5)] for column in range(10, 15))]
    return {"bodies": bodies, "headings": [heading] * SNAKES, "beans": [[0, 18]]}


def test_a_heading_into_the_neck_lasts_for_the_step_of_the_respawn_alone(monkeypatch):
    headings = []

    def look(bodies: Any, beans: Any, snake: int, heading: int) -> list[int]:
        headings.append(heading)
        return [0] * FEATURES

    monkeypatch.setattr(template, "look", look)
    monkeypatch.setattr(template, "think", lambda layers, seen: np.zeros(3))
    alive, back = state_with([[5, 5], [5, 6], [5, 7]]), state_with([[9, 0], [0, 0], [0, 19]])
    moved = state_with([[8, 0], [9, 0], [0, 0]])
    for told in (
        ask(alive, alive, 0),
        ask(back, alive, 0),  # compared without wrap: row 9 is below row 0
        ask(moved, back, 0),
        ask(back, None, 0),  # a new game, which starts in the same place
        ask(alive, back, 0),  # put back where nothing wraps
    ):
        template.choose(*template.read(told))
    assert headings[::SNAKES] == [2, 1, 0, 0, 2]


def test_after_an_error_a_submission_goes_where_nothing_is_and_says_so_once(player, capsys, caplog):
    state = state_with([[0, 0], [1, 0], [2, 0]])
    state["bodies"][1] = [[9, 0], [9, 19], [0, 19]]
    player["think"] = None
    assert [player["my_controller"](ask(state, None, 0), None, False) for _ in range(3)] == [[[0, 0, 0, 1]]] * 3
    assert capsys.readouterr().err.count("TypeError: 'NoneType' object is not callable") == 1
    assert list(player["failures"]) == ["choose"]
    assert caplog.records == []  # the original's root logger writes the record of the match


@pytest.mark.parametrize("observation", [None, {}, {2: [], "controlled_snake_index": 2}])
def test_in_a_match_nothing_raises(submission, observation, capsys):
    controller = runpy.run_path(str(submission))["my_controller"]
    assert controller(observation, None, False) == [[1, 0, 0, 0]]
    assert "Traceback" in capsys.readouterr().err  # but it is told


def test_a_snake_without_a_free_cell_goes_up():
    state = state_with([[0, 0], [1, 0], [2, 0]])
    state["bodies"][1] = [[9, 0], [9, 1], [0, 1]]
    state["bodies"][2] = [[0, 19], [1, 19], [2, 19]]
    assert template.flee(*template.read(ask(state, None, 0))) == 0


def test_a_submission_may_be_read_by_an_older_python(submission):
    ast.parse(submission.read_text(), feature_version=(3, 7))


@pytest.fixture
def is_refused(model, tmp_path, monkeypatch):
    """A function that exports with a change to the template, and looks that nothing is written."""

    def refuses(good: str, bad: str, match: str) -> None:
        wrong = tmp_path / "template.py"
        assert good in export.TEMPLATE.read_text()
        wrong.write_text(export.TEMPLATE.read_text().replace(good, bad))
        monkeypatch.setattr(export, "TEMPLATE", wrong)
        with pytest.raises(UserError, match=match):
            found = {"model": str(model), "runs_folder": tmp_path, "output": tmp_path / "submission.py"}
            export.main(Namespace(**found, depth=0, seconds=0.5))
        assert list(tmp_path.iterdir()) == [wrong]

    return refuses


def test_a_submission_that_does_not_play_as_the_model_is_not_written(is_refused):
    is_refused("DEPTH = 10", "DEPTH = 8", r"\d+ of 600 moves of the submission are not the model's")


def test_a_submission_that_takes_integers_as_they_come_is_not_written(is_refused):
    # NumPy 1 shifts to 0 in silence, NumPy 2 raises
    match = r"of the submission raised OverflowError|of 600 moves of the submission"
    is_refused("COLUMNS * int(row) + int(column)", "COLUMNS * row + column", match)


@pytest.mark.parametrize(
    ("good", "bad", "error"),
    [
        ("for _ in range(DEPTH):", "for _ in range(DEPTH // (len(bodies[snake]) < 4)):", "ZeroDivisionError"),
        ('observation["last_direction"]', 'observation["last"]', "KeyError: 'last'"),
    ],
)
def test_a_submission_that_raises_inside_is_not_written(is_refused, good, bad, error):
    is_refused(good, bad, rf"choose\(\) of the submission raised {error}")


def test_what_cannot_be_exported_is_told_on_one_line(model, tmp_path, monkeypatch):
    other = tmp_path / "actor_2.pth"
    torch.save(torch.nn.Linear(3, 3).state_dict(), other)
    for arguments, message in [
        ([tmp_path / "actor_3.pth"], f"there is no file {tmp_path / 'actor_3.pth'}"),
        ([other], f"{other} does not hold an actor"),
        ([export.__file__], f"{export.__file__} is no file of weights that torch.save() wrote"),
        (["run3", "--runs_folder", tmp_path], f"there is no {tmp_path / 'run3_*'}"),
        ([model, "--seconds", "nan"], "--seconds must be 0 or more, not nan"),
        (
            [model, "--output", tmp_path / "none" / "s.py"],
            f"cannot write {tmp_path / 'none' / 's.py'}: there is no folder",
        ),
    ]:
        monkeypatch.setattr(sys, "argv", ["export.py", *map(str, arguments)])
        with pytest.raises(UserError, match=re.escape(message)) as caught:
            export.main(export.read_settings())
        assert "\n" not in str(caught.value)


def test_the_time_of_a_call_is_what_a_match_sees_with_the_limit_in_force(tmp_path):
    path = tmp_path / "submission.py"
    path.write_text("import time\nSECONDS = 0.1\ndef my_controller(observation):\n    time.sleep(min(SECONDS, 60))\n")
    assert 0.1 <= export.time_calls(path, [{}, {}]) < 60


def test_without_memory_a_snake_is_taken_to_have_moved():
    assert template.find_heading([180, 0, 19], None) == 0
    assert template.find_heading([180, 0, 20, 40], [77, 78, 79]) == 0  # none is put back so long


def test_nothing_raises_where_there_is_no_stderr_either(submission, monkeypatch):
    player = runpy.run_path(str(submission))
    monkeypatch.setattr(sys, "stderr", None)
    assert player["my_controller"](None, None, False) == [[1, 0, 0, 0]]
    assert list(player["failures"]) == ["choose", "flee"]
