"""The trainer in one file: the same on 1, 2 and 3 ranks, over stops and starts, and with flags that are wrong."""

from __future__ import annotations

import os
import re
import runpy
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from player.search import load_player
from snakes.evaluation import play_games
from snakes.features import FEATURES, observe
from snakes.opponents import OPPONENTS
from snakes_ranks import FOLDER, checkpoint, launch, look_that_each_is_one_line, said, train

import ddpkit

pytestmark = pytest.mark.storm  # it trains again and again
PROGRAM = "train_min.py"
BOARDS, ROWS, UPDATES, GAMES = 7, 50, 58, 5  # of which 2 and 3 ranks get different shares
TINY = f"--boards {BOARDS} --rows {ROWS} --memory 630 --episodes 2 --games {GAMES}"


def train_with_a_signal(flags: str, number: int, updates: int) -> None:
    """The last rank gets a signal in its update of that number."""
    averaging = ddpkit.averaging
    left = iter(range(updates - 1, -1_000_000, -1))

    def interrupted(*modules: torch.nn.Module) -> Any:
        if next(left) == 0 and ddpkit.get_rank() == ddpkit.get_world_size() - 1:
            os.kill(os.getpid(), number)
        return averaging(*modules)

    ddpkit.averaging = interrupted
    train(PROGRAM, flags)


def look_alike(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Look that two runs have learned and played the same, but for the rounding of gradients."""
    for part in ("agent", "targets"):
        torch.testing.assert_close(one[part], other[part], rtol=0, atol=1e-4)
    for number, moments in one["optimizer"]["state"].items():
        torch.testing.assert_close(moments, other["optimizer"]["state"][number], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(one["arena"], other["arena"], rtol=0, atol=0)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a run on one process, and what it said."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, said(launch(1, train, PROGRAM, f"{TINY} --folder {folder}"))


Whole = tuple[Path, str]


def test_a_run_reports_and_leaves_a_checkpoint_and_an_actor_that_play_py_loads(whole: Whole) -> None:
    folder, output = whole
    report = re.search(rf"\[update {UPDATES} of {UPDATES}\] a_loss -?\d\S* c_loss \d\S*; (\d) of {GAMES} games", output)
    assert report and f"done after update {UPDATES} of {UPDATES}" in output
    state = checkpoint(folder)
    player = load_player(folder / "actor.pth", depth=0)
    for name, weights in player.actor.layers.state_dict().items():
        assert torch.equal(weights, state["agent"][f"actor.0.{name}"])
    assert play_games(player, OPPONENTS["greedy"], GAMES, seed=2**31).wins == int(report[1])
    assert state["arena"]["seen"].shape[0] == BOARDS and state["arena"]["ended"].any()


@pytest.mark.parametrize("ranks", [2, 3])
def test_several_ranks_learn_and_play_what_one_does(whole: Whole, tmp_path: Path, ranks: int) -> None:
    output = said(launch(ranks, train, PROGRAM, f"{TINY} --folder {tmp_path}"))
    look_alike(checkpoint(tmp_path), checkpoint(whole[0]))
    report = f"[update {UPDATES} of {UPDATES}]"
    assert report in output
    assert [line for line in whole[1].splitlines() if report in line] == [
        line for line in output.splitlines() if report in line
    ]


def test_a_run_that_signals_stop_twice_goes_on_with_other_ranks_as_if_nothing_had_happened(
    whole: Whole, tmp_path: Path
) -> None:
    flags = f"{TINY} --folder {tmp_path}"
    output = said(launch(3, train_with_a_signal, flags, signal.SIGTERM, 20), code=128 + signal.SIGTERM)
    first = checkpoint(tmp_path)["optimizer"]["state"][0]["step"]
    assert 20 <= first < 30 and f"stopped: the same command goes on after update {first:.0f} of" in output

    output = said(launch(1, train_with_a_signal, flags, signal.SIGINT, 15), code=128 + signal.SIGINT)
    assert f"goes on after update {first:.0f} of {UPDATES}, on 1 rank" in output
    second = checkpoint(tmp_path)["optimizer"]["state"][0]["step"]
    assert first + 15 <= second < first + 25

    output = said(launch(2, train, PROGRAM, flags))
    assert f"goes on after update {second:.0f} of {UPDATES}, on 2 rank" in output
    look_alike(checkpoint(tmp_path), checkpoint(whole[0]))


def test_wrong_flags_are_one_line_once_and_end_all_ranks(whole: Whole) -> None:
    folder, _ = whole
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    cases = {
        "--episodes 0": "--episodes must be at least 1, not 0",
        "--rows many": "--rows.*'many'",
        "--bords 3": "--bords 3",
        "--boards 1": "--boards 1 is too few for 2 ranks",
        "--opponent nobody": "'nobody'.*greedy",
        f"--folder {folder / 'actor.pth'}": "actor.pth is a file.*folder",
        "--boards 8": f"--boards {BOARDS} .*another --folder",
    }
    look_that_each_is_one_line(PROGRAM, f"{TINY} --folder {folder}", cases)
    assert before == {path: path.stat().st_mtime_ns for path in folder.iterdir()}


def test_a_batch_holds_what_was_seen_done_gained_and_seen_next() -> None:
    program = runpy.run_path(str(FOLDER / PROGRAM))
    torch.manual_seed(0)
    agent = program["Agent"]()
    memory, total = 64, 5
    arena = program["Arena"](range(total), total, memory, seed=3)
    seen, leads, times, headings, died = [], [], [], [], []
    for step in range(memory + 9):  # until the memory is overwritten
        boards = arena.game.boards
        look = np.empty((total, 3, FEATURES), np.float32)
        observe(boards, 0, look)
        seen.append(look)
        headings.append(boards.headings[:, :3].copy())
        leads.append(arena.game.scores() @ [1, -1])
        times.append(boards.times.copy())
        arena.play(step, agent, OPPONENTS["greedy"], np.random.default_rng(step))
        died.append(arena.game.died.copy())
    step = memory + 9

    rows = 4000
    batch = arena.sample(step, rows, np.random.default_rng(0), torch.device("cpu"))
    found = {}
    for at in range(step - memory, step - 1):
        for b in range(total):
            for k in range(3):
                found.setdefault(seen[at][b, k].tobytes(), []).append((at, b, k))
    met = set()
    for now, way, reward, later in zip(*(part.numpy() for part in batch), strict=True):
        places = [
            (at, b, k)
            for at, b, k in found[now.tobytes()]
            if times[at + 1][b] == times[at][b] + 1
            and seen[at + 1][b, k].tobytes() == later.tobytes()
            and leads[at + 1][b] - leads[at][b] == reward
            and (died[at][b, k] or program["DIRECTION"][headings[at][b, k], way[0]] == headings[at + 1][b, k])
        ]
        met.update(places)
        assert places
    whole = sum(times[at + 1][b] == times[at][b] + 1 for at in range(step - memory, step - 1) for b in range(total))
    assert whole * 3 < total * 3 * (memory - 1)  # a game has ended meanwhile
    assert len(met) > 0.95 * whole * 3 and len(batch.way) == pytest.approx(rows * whole / total / (memory - 1), abs=30)


def test_it_learns_to_beat_the_greedy_player_in_seconds(tmp_path: Path) -> None:
    output = said(launch(1, train, PROGRAM, f"--boards 64 --rows 512 --episodes 400 --games 100 --folder {tmp_path}"))
    rates = [float(rate) for rate in re.findall(r"win rate (\S+)", output)]
    assert rates[-1] > 0.4, output
