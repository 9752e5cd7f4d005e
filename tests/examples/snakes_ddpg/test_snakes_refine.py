"""Refining: the returns that critics are fitted to, and the program on one rank and on several."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from processes import free_port, platform_env, run
from snakes.ddpg import Actor, Critic
from snakes.features import FEATURES, observe
from snakes.game import Game
from snakes.opponents import OPPONENTS
from snakes.runs import MODELS, save_models
from snakes.search import GAMMA, Search, load_player

pytestmark = pytest.mark.storm  # it plays, and compiles what it plays with
FOLDER = Path(__file__).parents[3] / "examples" / "snakes_ddpg"
STEPS = 12


def program() -> dict:
    return runpy.run_path(str(FOLDER / "rl_trainer" / "refine.py"))


@pytest.fixture(scope="module")
def search() -> Search:
    torch.manual_seed(3)
    return Search(Actor(16), Critic(16), depth=1)


@pytest.mark.parametrize("side", [0, 1])
def test_a_return_is_what_the_team_gains_on_the_other_from_there_on(search: Search, side: int) -> None:
    game = Game(4, seed=2, episode_length=STEPS)
    leads, seen = [], []

    class Greedy(Search):  # notes each state; moves first
        def __call__(self, boards, team, actions):
            look = np.empty((4, 3, FEATURES), np.float32)
            observe(boards, side, look)
            seen.append(look)
            leads.append((game.scores()[:, side] - game.scores()[:, 1 - side]).tolist())
            OPPONENTS["greedy"](boards, team, actions)

    [played] = program()["play"](Greedy(search.actor, search.critic), OPPONENTS["greedy"], side, game)
    leads.append((game.scores()[:, side] - game.scores()[:, 1 - side]).tolist())
    look = np.empty((4, 3, FEATURES), np.float32)
    observe(game.boards, side, look)
    with torch.no_grad():
        end = (search.actor(torch.from_numpy(look)) * search.critic(torch.from_numpy(look))).sum(-1).mean(1).tolist()
    np.testing.assert_array_equal(played.seen[:, :, :3], np.stack(seen))
    for t in range(STEPS):
        for b in range(4):
            wanted = GAMMA ** (STEPS - t) * end[b]
            wanted += sum(GAMMA ** (u - t) * (leads[u + 1][b] - leads[u][b]) for u in range(t, STEPS))
            assert played.returns[t, b] == pytest.approx(wanted, abs=1e-5)


def refine(model: str, *flags: str) -> None:
    """What a rank does."""
    sys.argv = [
        "refine.py",
        model,
        *(flags or ["--games", "30", "--episode_length", "9", "--depth", "1", "--epochs", "3", "--batch", "64"]),
    ]
    runpy.run_path(str(FOLDER / "rl_trainer" / "refine.py"), run_name="__main__")


def refined_by(ranks: int, folder: Path, search: Search) -> Search:
    save_models(folder, 10, search.actor.state_dict(), search.critic.state_dict())
    port = free_port()
    envs = [platform_env(rank, ranks, port) for rank in range(ranks)] if ranks > 1 else [{"OMP_NUM_THREADS": "1"}]
    for ended in run(refine, envs, str(folder / MODELS / "actor_10.pth")):
        assert ended.code == 0, ended.output
    return load_player(folder / MODELS / "actor_refined.pth")


def test_any_number_of_ranks_fits_the_same_critics(tmp_path: Path, search: Search) -> None:
    one, *others = [refined_by(ranks, tmp_path / f"{ranks}", search) for ranks in (1, 2, 3)]
    for name, weights in search.actor.state_dict().items():
        assert torch.equal(one.actor.state_dict()[name], weights)
    for critic in (one.critic, one.rival):
        assert not torch.allclose(critic.values[0].weight, search.critic.values[0].weight, atol=1e-3)
    assert not torch.allclose(one.critic.values[0].weight, one.rival.values[0].weight, atol=1e-3)
    for other in others:
        for mine, theirs in ((one.critic, other.critic), (one.rival, other.rival)):
            for name, weights in mine.state_dict().items():
                torch.testing.assert_close(theirs.state_dict()[name], weights, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--games", "0"], "--games must be at least 10 here, not 0"),
        (["--depth", "0"], "--depth must be at least 1 here, not 0"),
        (["--seed", "2"], "is in no run's folder"),
    ],
)
def test_what_cannot_be_is_told_by_one_message(tmp_path: Path, flags: list[str], message: str) -> None:
    model = tmp_path / "actor_1.pth"
    model.touch()
    [ended] = run(refine, [{"OMP_NUM_THREADS": "1"}], str(model), *flags)
    assert ended.code == 2 and message in ended.output, ended.output
    assert "Traceback" not in ended.output
