"""Let a trained model play with its search, and fit two critics to what came of it: the team's, and the rivals'.

From the folder above, on one process; on two::

    python rl_trainer/refine.py latest
    torchrun --nproc_per_node=2 rl_trainer/refine.py latest

Beside the model it writes `actor_refined.pth`, which is the same actor, `critic_refined.pth` and `rival_refined.pth`: a
search values a board by the mean of the first critic over its team, less that of the second one over the rivals.
"""

import argparse
import logging
import sys
from copy import deepcopy
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2]))  # where `shared` is, which all trainers share
sys.path.insert(0, str(Path(__file__).parents[1]))

from shared.program import Parser, one_message, user_error
from snakes import opponents, runs
from snakes.collector import explore
from snakes.features import DIRECTION, FEATURES, PER_WAY, WAYS
from snakes.game import SNAKES, STEPS, Game
from snakes.opponents import Player
from snakes.search import DEPTH, GAMMA, Search, expect, load_player

import ddpkit

log = logging.getLogger("snakes")
SCRIPTED = ("territory", "foresighted", "sharing")
OTHERS = len(SCRIPTED) + 2  # with the model itself and an earlier one
WANDER = 0.02  # part of the moves to any free cell, so that the critics see what follows those too


def read_settings() -> argparse.Namespace:
    parser = Parser("Fits critics to a trained model's play with its search.", argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("model", help="path of an actor_*.pth, a run's folder, runN, runN:EPISODE, or latest")
    add("--runs_folder", type=Path, default=runs.ROOT, help="where the runs' folders are")
    add("--games", type=int, default=1280, help="to learn from, global")
    add("--episode_length", type=int, default=STEPS, help="steps of a game")
    add("--depth", type=int, default=DEPTH, help="steps that the search looks ahead")
    add("--epochs", type=int, default=4, help="how often it learns from each step of them")
    add("--batch", type=int, default=2730, help="boards per optimiser step, global")
    add("--lr", type=float, default=1e-3, help="learning rate at first; it falls evenly")
    add("--seed", type=int, default=1, help="of the games and of the order in which it learns from them")
    return parser.parse_args()


class Played(NamedTuple):
    """Hold what came of some games, for one of the teams."""

    seen: np.ndarray  # by all snakes before each step, the team's first: (steps, games, 6, FEATURES)
    returns: np.ndarray  # what the team gains from there on, discounted, (steps, games); NaN: too full to end


def play(search: Search, other: Player, side: int, game: Game) -> list[Played]:
    """Play new boards to their end; return what came of it for each team that searches.

    What the critic expects at the end is added to the returns.
    """
    teams = [side, 1 - side] if isinstance(other, Search) else [side]
    seen = {team: [] for team in teams}
    gains = []  # of team A on team B
    actions = np.zeros(game.died.shape, np.uint8)
    for _ in range(game.episode_length):
        search(game.boards, side, actions)
        other(game.boards, 1 - side, actions)
        for team in teams:
            both = torch.cat([search.look(game.boards, each) for each in (team, 1 - team)], dim=1)
            seen[team].append(both.numpy())
            wander(seen[team][-1], game, team, actions)
        game.step(actions)
        gains.append(game.rewards[:, :3].sum(1) - game.rewards[:, 3:].sum(1))
        game.reset(game.done & (game.boards.times < game.episode_length))  # too full to go on

    parts = []
    for team in teams:
        returns = np.array(gains, np.float64) * (1 - 2 * team)
        own = search.look(game.boards, team)
        with torch.no_grad():
            later = expect(search.critic, search.actor(own), own).numpy()
        for step in reversed(returns):
            step += GAMMA * later
            later = step
        returns[:, game.boards.times < game.episode_length] = np.nan
        parts.append(Played(np.stack(seen[team]), returns))
    return parts


def wander(seen: np.ndarray, game: Game, team: int, actions: np.ndarray) -> None:
    """Let some snakes of a team go any other way, if the cell there is free."""
    snakes = slice(3 * team, 3 * team + 3)
    preferred = DIRECTION[game.boards.headings[:, snakes]] == actions[:, snakes, None]
    ways = np.empty((len(actions), 3), np.uint8)
    other = actions.copy()
    explore(game.boards, team, preferred.astype(np.float32), WANDER, ways, other)
    is_free = np.take_along_axis(seen[:, :3, : WAYS * PER_WAY : PER_WAY] > 0, ways[..., None], axis=2)[..., 0]
    actions[:, snakes] = np.where(is_free, other[:, snakes], actions[:, snakes])


def collect(search: Search, model: Path, settings: argparse.Namespace, games: int, mine: np.ndarray) -> list[Played]:
    """Play this rank's games on either side: with scripted players, the model itself and that of half its run."""
    others = {name: opponents.get(name) for name in SCRIPTED} | {"itself": search}
    earlier = [path for name, path in runs.list_models(model.parents[1]).items() if name != "best"]
    if earlier:
        path = earlier[len(earlier) // 2]
        others[path.name] = load_player(path, search.depth)
    parts = []
    for place, (name, other) in enumerate(others.items()):
        for side in (0, 1):
            seed = ddpkit.sample_seed(settings.seed, 1, 2 * place + side)
            game = Game(len(mine), seed, first=int(mine[0]), episode_length=settings.episode_length)
            parts += play(search, other, side, game)
        log.info("played %d games with %s", 2 * games, name)
    return parts


def draw_rows(parts: list[Played], rng: np.random.Generator, size: int, games: int, mine: np.ndarray) -> list[Tensor]:
    """Draw steps of all ranks' games, on all ranks alike; return those of this rank's: seen, and the returns."""
    drawn = [rng.integers(0, limit, size) for limit in (len(parts), len(parts[0].returns), games)]
    rows = [(parts[p], t, g - mine[0]) for p, t, g in zip(*drawn, strict=True) if mine[0] <= g <= mine[-1]]
    returns = np.array([played.returns[t, g] for played, t, g in rows], np.float32)
    seen = np.array([played.seen[t, g] for played, t, g in rows], np.float32).reshape(-1, SNAKES, FEATURES)
    whole = ~np.isnan(returns)
    return [torch.from_numpy(seen[whole]), torch.from_numpy(returns[whole])]


def fit(search: Search, parts: list[Played], settings: argparse.Namespace, games: int, mine: np.ndarray) -> None:
    """Fit the critics of the team and of the rivals, their difference, to the returns. Collective."""
    networks = nn.ModuleList([search.critic, search.rival])
    optimizer = torch.optim.Adam(networks.parameters(), lr=settings.lr)
    rng = np.random.default_rng(ddpkit.sample_seed(settings.seed, 4, 0))
    steps = max(1, settings.epochs * len(parts) * settings.episode_length * games // settings.batch)
    for step in range(1, steps + 1):
        optimizer.param_groups[0]["lr"] = settings.lr * (1 - (step - 1) / steps)
        both, returns = draw_rows(parts, rng, settings.batch, games, mine)
        with torch.no_grad():
            chances = search.actor(both)
        own = expect(search.critic, chances[:, :3], both[:, :3])
        theirs = expect(search.rival, chances[:, 3:], both[:, 3:])
        error = ddpkit.global_mean((own - theirs - returns).square().sum(), len(returns))
        optimizer.zero_grad()
        error.backward()
        ddpkit.average_gradients(networks)
        nn.utils.clip_grad_norm_(networks.parameters(), 1.0)
        optimizer.step()
        if step % max(1, steps // settings.epochs) == 0:
            error = ddpkit.all_reduce_mean(error.detach())
            log.info("step %d of %d: mean squared error %.2f", step, steps, error)
    ddpkit.check_replicas(networks, optimizer)


@user_error("cannot start", ValueError, OSError)
def prepare(settings: argparse.Namespace) -> Path:
    """Check the settings and find the model."""
    least = {"games": 2 * OTHERS * ddpkit.get_world_size(), "episode_length": 1, "depth": 1, "epochs": 1, "batch": 1}
    for name, value in least.items():
        if getattr(settings, name) < value:
            raise ValueError(f"--{name} must be at least {value} here, not {getattr(settings, name)}")
    model = runs.parse(settings.model, settings.runs_folder)
    if model.stem == "actor_refined":  # begins again with the critic from training
        model = runs.find_model(model.parents[1])
    if model.parent.name != runs.MODELS:
        raise ValueError(f"{model} is in no run's folder, where its critics are written: move it to RUN/{runs.MODELS}/")
    return model


def main(settings: argparse.Namespace, job: ddpkit.Context) -> None:
    """Play, fit and save. Collective."""
    model = ddpkit.run_on_main(prepare, settings)
    search = load_player(model, settings.depth)
    log.info("refines the critics of %s", model)
    games = settings.games // (2 * OTHERS)  # on one side against one of the others, of all ranks
    mine = np.array_split(np.arange(games), job.world_size)[job.rank]
    parts = collect(search, model, settings, games, mine)
    search.rival = deepcopy(search.critic)
    fit(search, parts, settings, games, mine)
    states = [network.state_dict() for network in (search.actor, search.critic, search.rival)]
    ddpkit.run_on_main(runs.save_models, model.parents[1], "refined", *states)
    log.info("wrote %s", model.with_name("actor_refined.pth"))


if __name__ == "__main__":
    with one_message(logging.Formatter("%(message)s")):
        given = read_settings()
        with ddpkit.distributed(num_threads=1) as context:
            main(given, context)
