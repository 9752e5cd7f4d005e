"""Distilling: what the network sees and learns; the same on 1, 2 and 3 ranks, over stops and starts; wrong flags."""

from __future__ import annotations

import os
import re
import signal
from argparse import Namespace
from pathlib import Path
from typing import Any

import export
import numpy as np
import player.submission_template as template
import pytest
import torch
from player import labels
from player.search import GAMMA, load_player, search_of
from player.student import Learners, Student, StudentPolicy, look
from rl_trainer import distil
from snakes import runs
from snakes.ddpg import Actor, Critic, Policy
from snakes.evaluation import play_games
from snakes.features import DIRECTION, FEATURES, observe, see
from snakes.game import BEAN, COLUMNS, LEFT, NEXT, NONE, RIGHT, SNAKES, Game, foresee
from snakes.opponents import OPPONENTS
from snakes_boards import crowded, place
from snakes_ranks import checkpoint, launch, look_that_each_is_one_line, said, train

import ddpkit

pytestmark = pytest.mark.storm  # it plays and learns again and again
PROGRAM = "rl_trainer/distil.py"
GAMES, ROUNDS, FILES, STEPS = 5, 2, 3, 200  # of the games, 2 and 3 ranks get different shares
LEARNT = 25  # steps of learning in the first round
TINY = (
    f"latest --games {GAMES} --games_at_once 2 --rounds {ROUNDS} --depth 1 --epochs 1 --batch_size 40 --eval_games 3 "
    "--precision float32"
)


def train_with_a_signal(flags: str, number: int, step: int) -> None:
    """The last rank gets a signal in its step of that number, of labelling or of learning."""
    now = ddpkit.Stop.now
    left = iter(range(step - 1, -1_000_000, -1))

    def interrupted(stop: ddpkit.Stop) -> bool:
        if next(left) == 0 and ddpkit.get_rank() == ddpkit.get_world_size() - 1:
            os.kill(os.getpid(), number)
        return now(stop)

    ddpkit.Stop.now = interrupted
    train(PROGRAM, flags)


def new_run(root: Path) -> Path:
    """Makes a run with an untrained model, of strong opinions; returns the folder of its models."""
    torch.manual_seed(4)
    networks = Actor(16), Critic(16)
    with torch.no_grad():
        for parameter in torch.nn.ModuleList(networks).parameters():
            parameter *= 2
    runs.save_models(root / "run1", "best", *(network.state_dict() for network in networks))
    return root / "run1" / runs.MODELS


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The models' folder of a run on one process, and what it said."""
    root = tmp_path_factory.mktemp("whole")
    folder = new_run(root)
    return folder, said(launch(1, train, PROGRAM, f"{TINY} --runs_folder {root}"))


Whole = tuple[Path, str]


def steps_of(folder: Path) -> int:
    return ddpkit.Checkpointer(folder / "distilled" / "checkpoints").steps()[-1]


def look_alike(one: Path, other: Path) -> None:
    """Look that two runs have made the same labels, but for the rounding of values, and learned the same."""
    names = [path.name for path in sorted((one / "distilled").glob("labels_*"))]
    assert len(names) == ROUNDS * FILES
    for name in names:
        for found, expected in zip(*(labels.read(folder / "distilled" / name) for folder in (one, other)), strict=True):
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
    # Adam makes whole steps of gradients that are rounding alone, so the weights behind them differ
    examples = labels.Examples([one / "distilled" / name for name in names], 0.5)
    batch = examples.__getitems__(list(range(0, len(examples), 20)))
    torch.testing.assert_close(what_is_learnt(one, batch), what_is_learnt(other, batch), rtol=1e-3, atol=1e-3)
    assert steps_of(one) == steps_of(other)


@torch.no_grad()
def what_is_learnt(folder: Path, batch: labels.Batch) -> list[torch.Tensor]:
    """The probabilities and values that the networks of a run give a batch."""
    learners = Learners()
    learners.load_state_dict(checkpoint(folder / "distilled" / "checkpoints")["learners"])
    ratings = learners.student(batch.pictures.flatten(0, 1), batch.numbers.flatten(0, 1))
    return [ratings.softmax(-1), learners.rivals(batch.rivals), learners.value(batch.later)]


def test_a_run_leaves_a_network_that_plays_as_it_has_reported(whole: Whole) -> None:
    folder, output = whole
    path = runs.parse("latest", folder.parents[1])
    assert path == folder / "actor_distilled.pth"
    report = re.search(r"round 2, without search against greedy: (\d) of 3 games won.*score (\S+) : (\S+)", output)
    result = play_games(load_player(path, 0), OPPONENTS["greedy"], 3, seed=2**31)
    assert (result.wins, f"{result.score / 3:.1f}") == (int(report[1]), report[2])
    assert re.search(r"divergence \d", output) and any((folder / "distilled").glob("events.*"))
    known = {
        "learners": checkpoint(folder / "distilled" / "checkpoints")["learners"],
        "actor": torch.load(folder / "actor_best.pth"),
    }
    for name, weights in torch.load(path).items():
        kind, _, rest = name.partition(".")
        assert torch.equal(weights, known[kind][rest])


def test_the_same_command_says_that_all_is_done_and_other_flags_are_refused(whole: Whole) -> None:
    folder, _ = whole
    root = folder.parents[1]
    before = {
        path: path.stat().st_mtime_ns for path in (folder / "distilled").rglob("*.*") if "events" not in path.name
    }
    assert "all rounds are done" in said(launch(1, train, PROGRAM, f"{TINY} --runs_folder {root}"))
    (other := root / "other" / "run1").mkdir(parents=True)
    torch.save({"weight": torch.zeros(3)}, root / "actor_3.pth")
    cases = {
        "--games 0": "--games must be above 0, not 0",
        "--temperature nan": "--temperature must be above 0, not nan",
        "--rounds many": "--rounds.*'many'",
        "--round 3": "--round 3",
        "--games 6": "distilled began with --games 5: pass the same, or remove that folder",
        f"--runs_folder {root / 'none'}": "there is no .*run.*none",
        f"--runs_folder {other.parent}": "there is no ",
    }
    look_that_each_is_one_line(PROGRAM, f"{TINY} --runs_folder {root}", cases)
    files = {str(root / "actor_3.pth"): "does not hold an actor", str(folder / "actor_distilled.pth"): "is distilled"}
    look_that_each_is_one_line(PROGRAM, "", files)
    new_run(root / "old")
    (root / "old" / "run1" / "trained_model" / "distilled").mkdir()
    runs.save_json(root / "old" / "run1" / "trained_model" / "distilled" / "config.json", {"games": 5})
    old = {f"--runs_folder {root / 'old'}": "distilled was made by another version of this program: remove that folder"}
    look_that_each_is_one_line(PROGRAM, TINY, old)
    assert before == {path: path.stat().st_mtime_ns for path in before}


@pytest.mark.parametrize("ranks", [2, 3])
def test_several_ranks_label_and_learn_what_one_does(whole: Whole, tmp_path: Path, ranks: int) -> None:
    folder = new_run(tmp_path)
    output = said(launch(ranks, train, PROGRAM, f"{TINY} --runs_folder {tmp_path}"))
    look_alike(folder, whole[0])
    results = [[line for line in text.splitlines() if "games won" in line] for text in (output, whole[1])]
    assert len(results[0]) == 5 * ROUNDS
    assert results[0][:5] == results[1][:5]  # later, rounding turns a move of hundreds


def test_a_run_that_signals_stop_goes_on_with_other_ranks_as_if_nothing_had_happened(
    whole: Whole, tmp_path: Path
) -> None:
    folder = new_run(tmp_path)
    flags = f"{TINY} --runs_folder {tmp_path}"
    output = said(launch(1, train_with_a_signal, flags, signal.SIGINT, STEPS + 50), code=128 + signal.SIGINT)
    assert "stopped while labelling in round 1: the same command goes on" in output
    made = {path: path.stat().st_mtime_ns for path in (folder / "distilled").glob("labels_*")}
    assert len(made) == 1

    output = said(launch(2, train_with_a_signal, flags, signal.SIGTERM, STEPS + 4), code=128 + signal.SIGTERM)
    assert "2 of 3 files are left" in output and "stopped in round 1: the same command goes on" in output
    step = steps_of(folder)
    assert 4 <= step < LEARNT

    left = LEARNT - step
    output = said(launch(3, train_with_a_signal, flags, signal.SIGTERM, left + 50), code=128 + signal.SIGTERM)
    assert f"goes on after step {step}, in round 1, on 3 rank" in output
    assert "stopped while labelling in round 2: the same command goes on" in output

    output = said(launch(2, train, PROGRAM, flags))
    assert f"goes on after step {LEARNT}, in round 2, on 2 rank" in output
    assert made == {path: path.stat().st_mtime_ns for path in made}
    look_alike(folder, whole[0])


@pytest.mark.parametrize("depth", [0, 2])
def test_a_submission_plays_as_the_distilled_network(whole: Whole, tmp_path: Path, depth: int) -> None:
    folder, _ = whole
    path = tmp_path / "submission.py"
    found = {"model": str(folder / "actor_distilled.pth"), "runs_folder": tmp_path, "output": path}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export, "CHECKED", 30)
        export.main(Namespace(**found, depth=depth, seconds=0.5))  # raises if it plays otherwise
    assert ("STEPS = 2" in path.read_text()) == (depth == 2)


# What the network sees, and what it learns from


def all_ways(count: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 3, (count, SNAKES)).astype(np.uint8)


def test_a_picture_is_that_of_the_submission() -> None:
    game = crowded(30, beans=5)
    boards, ways = game.boards, all_ways(30)
    for s in range(SNAKES):
        pictures = look(boards, s, ways)
        for b in range(30):
            bodies = game.bodies(b)
            beans = [int(bean) for bean in boards.beans[b] if bean < 200]
            mates = range(s // 3 * 3, s)
            going = [
                template.neighbours(bodies[mate][0])[template.TURNS[boards.headings[b, mate]][ways[b, mate]]]
                for mate in mates
            ]
            drawn = template.draw(bodies, beans, s, int(boards.headings[b, s]), going)
            np.testing.assert_allclose(pictures[b], drawn, rtol=0, atol=1e-6)


def test_a_snake_is_in_the_middle_of_its_picture_and_goes_up() -> None:
    game = Game(1)
    bodies = [[65, 64, 63], [68, 88, 108], *([[3 * i, 3 * i + 1, 3 * i + 2] for i in range(4)])]
    place(game, 0, bodies, [RIGHT, 0, LEFT, LEFT, LEFT, LEFT], [66, 85])
    picture = look(game.boards, 0, np.zeros((1, SNAKES), np.uint8))[0]
    beans, own = picture[0], picture[1]
    assert beans[6, 7] == 1 and beans[7, 8] == 1  # one ahead, one to the right
    np.testing.assert_allclose(own[7:10, 7], [3 / 20, 2 / 20, 1 / 20])
    assert picture[2][4, 7] > 0 and picture[7][4, 7] > 0  # a mate's head, three steps ahead


def flipped(game: Game) -> Game:
    """The boards of a game, left to right."""
    other = Game(len(game.done))
    for b in range(len(game.done)):
        turn = np.array([0, 1, RIGHT, LEFT])
        bodies = [
            [cell // COLUMNS * COLUMNS + COLUMNS - 1 - cell % COLUMNS for cell in body] for body in game.bodies(b)
        ]
        beans = [int(bean) for bean in game.boards.beans[b] if bean < 200]
        beans = [bean // COLUMNS * COLUMNS + COLUMNS - 1 - bean % COLUMNS for bean in beans]
        place(other, b, bodies, turn[game.boards.headings[b]], beans)
    return other


@pytest.mark.parametrize(("board", "living"), [(crowded(12, beans=5), 0), (Game(12), 6)], ids=["full", "new"])
def test_every_second_epoch_a_state_is_seen_in_the_mirror(board: Game, living: int, tmp_path: Path) -> None:
    batches = []
    values = np.random.default_rng(1).normal(size=(12, 3, 3))
    for number, (game, order) in enumerate([(board, 1), (flipped(board), -1)]):
        ways = all_ways(12)
        ways = ways if order == 1 else 2 - ways
        path = tmp_path / f"{number}.npz"
        actions = DIRECTION[game.boards.headings, ways]
        states = labels.keep(game.boards, 1, ways, values[..., ::order], actions, np.zeros((12, 6), np.int16))
        labels.write(path, [states, states])  # of the last step nobody knows what follows
        batches.append(labels.Examples([path], 0.5).__getitems__(list(range(12))))
    died = np.zeros((12, SNAKES), np.bool_)
    foresee(game.boards, actions, np.zeros((12, SNAKES), np.int16), died)
    put_back = died.any(1)  # to where no mirror shows
    assert (~put_back).sum() >= living
    plain, others = batches
    found = labels.mirror(labels.Batch(*(part.clone() for part in plain)), epoch=1)
    for name, part, before, other in zip(found._fields, found, plain, others, strict=True):
        for row in range(12):
            if name == "later" and put_back[row]:
                continue
            torch.testing.assert_close(part[row], before[row] if row % 2 else other[row])


def test_labels_are_the_searchs_values_of_what_the_players_saw(tmp_path: Path) -> None:
    torch.manual_seed(0)
    teacher, mover = search_of(Actor(8), Critic(8), depth=1), StudentPolicy(Student())
    steps = list(labels.play(range(3, 9), 7, mover, teacher, [OPPONENTS["greedy"], Policy(Actor(8))]))
    assert len(steps) == STEPS
    labels.write(tmp_path / "some.npz", steps[20:30])
    examples = labels.Examples([tmp_path / "some.npz"], temperature=2.0)
    batch = examples.__getitems__([3, 17, 40])
    assert batch.places.tolist() == [3, 17, 40] and len(examples) == 54
    for row, at in enumerate([3, 17, 40]):
        state = labels.States(*(array[at : at + 1] for array in examples.states))
        boards, team = labels.restore(state), int(state.teams[0])
        ways, values = teacher.plan(boards, team)
        np.testing.assert_allclose(values, state.values, atol=1e-5)
        assert (ways[:, 3 * team : 3 * team + 3] == state.ways).all()
        seen = np.empty((1, 3, FEATURES), np.float32)
        observe(boards, team, seen)
        torch.testing.assert_close(batch.numbers[row], torch.from_numpy(seen[0]))
        expected = torch.from_numpy(values[0] / 2).softmax(-1)
        torch.testing.assert_close(batch.goals[row], expected, check_dtype=False)
        for k in range(3):
            picture = look(boards, 3 * team + k, ways)
            torch.testing.assert_close(batch.pictures[row, k], torch.from_numpy(picture[0]))


def test_what_rivals_do_and_what_follows_are_those_of_the_game(tmp_path: Path) -> None:
    torch.manual_seed(0)
    teacher, mover = search_of(Actor(8), Critic(8), depth=1), Policy(Actor(8))
    steps = list(labels.play(range(2, 6), 7, mover, teacher, [OPPONENTS["foresighted"]]))
    labels.write(tmp_path / "all.npz", steps)
    examples = labels.Examples([tmp_path / "all.npz"], temperature=1.0)
    assert len(examples) == 4 * (STEPS - 1)
    batch = examples.__getitems__(list(range(len(examples))))
    order = np.arange(4 * (STEPS - 1)).reshape(STEPS - 1, 4)
    for at in (0, 57, STEPS - 2):
        now, then = steps[at], steps[at + 1]
        lead = (then.lengths.astype(int) - now.lengths).reshape(4, 2, 3).sum(2)
        boards, after = labels.restore(now), labels.restore(then)
        for game, team in enumerate(now.teams):
            row = order[at, game]
            assert now.gains[game] == lead[game, team] - lead[game, 1 - team]
            new = ~np.isin(after.beans[game], now.beans[game])
            after.cells[game, after.beans[game][new]] -= BEAN
            after.beans[game][new] = NONE
            torch.testing.assert_close(batch.later[row], torch.from_numpy(see(after, team, 1 - team)[game]))
            rivals = np.r_[3 - 3 * team : 6 - 3 * team]
            torch.testing.assert_close(batch.rivals[row], torch.from_numpy(see(boards, team, 1 - team)[game, 3:]))
            directions = DIRECTION[now.headings[game, rivals], batch.taken[row]]
            assert (directions == now.actions[game, rivals]).all()
            heads = NEXT[boards.bodies[game, rivals, boards.heads[game, rivals]], directions]
            lived = then.lengths[game, rivals] >= now.lengths[game, rivals]
            assert (heads == after.bodies[game, rivals, after.heads[game, rivals]])[
                lived & (now.lengths[game, rivals] > 3)
            ].all()

            total, weight = 0.0, 1.0
            for state in steps[at + 1 : -1]:
                expected = state.values[game, 2].max()
                total += weight * ((1 - labels.LAMBDA) * expected + labels.LAMBDA * state.gains[game])
                weight *= labels.LAMBDA * GAMMA
            total += weight * steps[-1].values[game, 2].max()
            assert float(batch.gains[row]) == pytest.approx(total, abs=1e-4)


def test_the_losses_are_means_over_snakes_and_states(tmp_path: Path) -> None:
    game = crowded(6, beans=5)
    rng = np.random.default_rng(0)
    actions = DIRECTION[game.boards.headings, all_ways(6)]
    states = labels.keep(game.boards, 0, all_ways(6), rng.normal(size=(6, 3, 3)), actions, np.zeros((6, 6), np.int16))
    labels.write(tmp_path / "some.npz", [states, states])
    batch = labels.Examples([tmp_path / "some.npz"], 0.5).__getitems__(list(range(6)))
    torch.manual_seed(0)
    learners = Learners(hidden=8)
    divergence, surprise, error = distil.losses(learners, batch, bfloat16=False).tolist()
    divergences, surprises, errors = [], [], []
    with torch.no_grad():
        for b in range(6):
            for k in range(3):
                found = learners.student(batch.pictures[b, k : k + 1], batch.numbers[b, k : k + 1])[0].softmax(-1)
                goal = batch.goals[b, k]
                divergences.append(float((goal * (goal.log() - found.log())).sum()))
                surprises.append(-float(learners.rivals(batch.rivals[b, k]).log()[batch.taken[b, k]]))
            errors.append(float(learners.value(batch.later[b : b + 1]) - batch.gains[b]) ** 2)
    assert divergence == pytest.approx(np.mean(divergences), rel=1e-4)
    assert surprise == pytest.approx(np.mean(surprises), rel=1e-4)
    assert error == pytest.approx(np.mean(errors), rel=1e-4)


def test_a_game_depends_on_its_number_alone_and_each_kind_is_played() -> None:
    torch.manual_seed(0)
    teacher, mover = search_of(Actor(8), Critic(8), depth=1), Policy(Actor(8))
    asked: list[tuple[str, int, int]] = []

    def told(name: str, player: Any) -> Any:
        def play(boards: Any, team: int, actions: np.ndarray) -> None:
            asked.append((name, team, len(actions)))
            player(boards, team, actions)

        return play

    rivals = [told(name, OPPONENTS[name]) for name in ("greedy", "sharing")]
    all_at_once = list(labels.play(range(8), 7, told("mover", mover), teacher, rivals))
    assert {(name, team, count) for name, team, count in asked if count} == {
        ("mover", 0, 2), ("mover", 1, 2), ("greedy", 1, 2), ("greedy", 0, 2), ("sharing", 1, 2), ("sharing", 0, 2)
    }  # fmt: skip
    some = list(labels.play(range(4, 6), 7, mover, teacher, rivals))
    for one, other in zip(all_at_once, some, strict=True):  # of each step: games 0, 2, 4, 6, 1, 3, 5, 7; and 4, 5
        for found, expected in zip(other, one, strict=True):
            np.testing.assert_allclose(found, expected[[2, 6]], atol=1e-5)
