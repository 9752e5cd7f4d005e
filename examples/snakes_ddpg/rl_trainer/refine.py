"""Let a trained model play with its search, and fit two critics to what came of it: the team's own, and the rivals'.

From the folder above, on one process; on two::

    python rl_trainer/refine.py latest
    torchrun --nproc_per_node=2 rl_trainer/refine.py latest

Beside the model it writes `actor_refined.pth`, which is the same actor, `critic_refined.pth` and
`rival_refined.pth`: a search values a board by the mean of the first critic over its team, less that
of the second one over the rivals. Each game is against a scripted player, or a search with this model
or an earlier one of its run.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))  # where `shared` is, which all trainers share
sys.path.insert(0, str(Path(__file__).parents[1]))

from shared.program import Parser, one_message, user_error
from snakes import opponents, runs
from snakes.features import DIRECTION, FEATURES, PER_WAY, WAYS, observe
from snakes.game import SNAKES, STEPS, Boards, Game
from snakes.networks import Critic
from snakes.opponents import Player
from snakes.search import DEPTH, GAMMA, Search, load_search

import ddpkit

log = logging.getLogger("snakes")
SCRIPTED = ("territory", "foresighted")
WANDER = 0.02  # part of the moves to any free cell, so that the critics see what follows those too


def read_settings(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser("Fits critics to a trained model's play with its search.")
    parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    add = parser.add_argument
    add("model", help="path of an actor_*.pth, a run's folder, runN, runN:EPISODE, or latest")
    add("--games", type=int, default=768, help="to learn from, global")
    add("--episode_length", type=int, default=STEPS, help="steps of a game")
    add("--depth", type=int, default=DEPTH, help="steps that the search looks ahead")
    add("--epochs", type=int, default=4, help="how often it learns from each step of them")
    add("--batch", type=int, default=2730, help="boards per optimiser step, global")
    add("--lr", type=float, default=1e-3, help="learning rate at first; it falls evenly")
    add("--seed", type=int, default=1, help="of the games and of the order in which it learns from them")
    return parser.parse_args(argv)


class Wanderer:
    """Play as another player does, but for some moves to any free cell."""

    def __init__(self, player: Player, rng: np.random.Generator) -> None:
        self.player = player
        self.rng = rng

    def __call__(self, boards: Boards, team: int, actions: np.ndarray) -> None:
        self.player(boards, team, actions)
        seen = np.empty((len(actions), 3, FEATURES), np.float32)
        observe(boards, team, seen)
        free = seen[..., : WAYS * PER_WAY : PER_WAY] > 0
        ways = (free * self.rng.random(free.shape)).argmax(-1)
        wanders = free.any(-1) & (self.rng.random(ways.shape) < WANDER)
        snakes = slice(3 * team, 3 * team + 3)
        anywhere = DIRECTION[boards.headings[:, snakes], ways]
        actions[:, snakes] = np.where(wanders, anywhere, actions[:, snakes])


def look(boards: Boards, team: int) -> np.ndarray:
    """See what all snakes see, those of a team first: (n, 6, FEATURES)."""
    seen = np.empty((2, len(boards.times), 3, FEATURES), np.float32)
    observe(boards, team, seen[0])
    observe(boards, 1 - team, seen[1])
    return np.concatenate(seen, axis=1)


@torch.no_grad()
def expect(search: Search, seen: np.ndarray) -> np.ndarray:
    """Find what the critic expects of the team that is first in what all snakes see: (n,)."""
    own = torch.from_numpy(seen[:, :3])
    return (search.actor(own) * search.critic(own)).sum(-1).mean(-1).numpy()


def play(
    search: Search, player: Player, other: Player, side: int, game: Game
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Play the boards to their end; for each team that searches give what was seen, and what it gained from there on.

    The gains are on the other team, each later one discounted, and what the critic expects at the
    end is added. Boards that are too full before the end count for nothing.
    """
    teams = [side, 1 - side] if isinstance(other, Wanderer) else [side]
    seen = [[] for _ in teams]
    leads = [np.zeros(len(game.done))]  # of team A, before each step and at the end
    actions = np.zeros((len(game.done), SNAKES), np.uint8)
    whole = np.ones(len(game.done), np.bool_)
    for _ in range(game.episode_length):
        for place, team in enumerate(teams):
            seen[place].append(look(game.boards, team))
        player(game.boards, side, actions)
        other(game.boards, 1 - side, actions)
        game.step(actions)
        scores = game.scores()
        leads.append((scores[:, 0] - scores[:, 1]).astype(np.float64))
        early = game.done & (game.boards.times < game.episode_length)
        whole &= ~early
        game.reset(early)
    gains = np.diff(leads, axis=0)
    for place, team in enumerate(teams):
        later = expect(search, look(game.boards, team))
        returns = np.empty_like(gains)
        for step in reversed(range(len(gains))):
            later = gains[step] * (1 - 2 * team) + GAMMA * later
            returns[step] = later
        yield np.stack(seen[place])[:, whole].reshape(-1, SNAKES, FEATURES), returns[:, whole].ravel()


def others_of(search: Search, model: Path) -> list[tuple[str, Player | Search]]:
    """List whom it plays, in as many games each: scripted players, itself, and the model of half its run."""
    found = [(name, opponents.get(name)) for name in SCRIPTED]
    found.append(("itself", search))
    numbers = [name for name in runs.list_models(model.parents[1]) if name != "best"]
    if numbers:
        earlier = numbers[len(numbers) // 2]
        found.append((f"its episode {earlier}", load_search(model.with_name(f"actor_{earlier}.pth"), search.depth)))
    return found


def collect(search: Search, model: Path, settings: argparse.Namespace, job: ddpkit.Context) -> tuple[torch.Tensor, ...]:
    """Play this rank's share of the games; return what all snakes saw, (n, 6, FEATURES), and the returns, (n,)."""
    rng = np.random.default_rng(ddpkit.sample_seed(settings.seed, 1, job.rank))
    player = Wanderer(search, rng)
    others = others_of(search, model)
    each = max(job.world_size, settings.games // (2 * len(others)))  # on either side; every rank has some
    share = np.array_split(np.arange(each), job.world_size)[job.rank]
    parts = []
    for place, (name, other) in enumerate(others):
        rival = Wanderer(other, rng) if isinstance(other, Search) else other
        for side in (0, 1):
            seed = ddpkit.sample_seed(settings.seed, 3, 2 * place + side)
            game = Game(len(share), seed, first=int(share[0]), episode_length=settings.episode_length)
            parts += play(search, player, rival, side, game)
        log.info("played %d games with %s", 2 * each, name)
    seen, returns = zip(*parts, strict=True)
    return torch.from_numpy(np.concatenate(seen)), torch.from_numpy(np.concatenate(returns)).float()


def fit(
    search: Search, seen: torch.Tensor, returns: torch.Tensor, settings: argparse.Namespace, job: ddpkit.Context
) -> None:
    """Fit the critics of the team and of the rivals, their difference, to the returns. Collective."""
    networks = nn.ModuleList([search.critic, search.rival])
    optimizer = torch.optim.Adam(networks.parameters(), lr=settings.lr)
    rng = np.random.default_rng(ddpkit.sample_seed(settings.seed, 2, job.rank))
    boards = ddpkit.all_reduce(len(returns))
    steps = max(1, settings.epochs * boards // settings.batch)
    error = 0.0
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = settings.lr * (1 - step / steps)
        rows = torch.from_numpy(rng.integers(0, len(returns), max(1, settings.batch // job.world_size)))
        both = seen[rows]
        with torch.no_grad():
            chances = search.actor(both)
        own = (chances[:, :3] * search.critic(both[:, :3])).sum(-1).mean(-1)
        theirs = (chances[:, 3:] * search.rival(both[:, 3:])).sum(-1).mean(-1)
        loss = nn.functional.mse_loss(own - theirs, returns[rows])
        optimizer.zero_grad()
        loss.backward()
        ddpkit.average_gradients(networks)
        nn.utils.clip_grad_norm_(networks.parameters(), 1.0)
        optimizer.step()
        error += loss.item()
        if (step + 1) * settings.epochs % steps < settings.epochs:
            log.info(
                "step %d of %d: mean squared error %.2f of a variance of %.2f",
                step + 1,
                steps,
                error * settings.epochs / steps,
                returns.var(),
            )
            error = 0.0
    ddpkit.check_replicas(networks, optimizer)


@user_error("cannot start", ValueError, OSError)
def prepare(settings: argparse.Namespace) -> Path:
    """Check the settings and find the model."""
    for name in ("games", "episode_length", "depth", "epochs", "batch"):
        if getattr(settings, name) < 1:
            raise ValueError(f"--{name} must be at least 1, not {getattr(settings, name)}")
    return runs.parse(settings.model)


def save(search: Search, folder: Path) -> None:
    """Save the actor and both critics beside the model."""
    runs.save_models(
        folder, "refined", search.actor.state_dict(), search.critic.state_dict(), search.rival.state_dict()
    )


def main(settings: argparse.Namespace, job: ddpkit.Context) -> None:
    """Play, fit and save. Collective."""
    model = ddpkit.run_on_main(prepare, settings)
    search = load_search(model, settings.depth)
    log.info("refines the critics of %s", model)
    seen, returns = collect(search, model, settings, job)
    search.rival = Critic(hidden=len(search.actor.layers[0].bias))
    search.rival.load_state_dict(search.critic.state_dict())
    fit(search, seen, returns, settings, job)
    ddpkit.run_on_main(save, search, model.parents[1])
    log.info("wrote %s", model.with_name("actor_refined.pth"))


if __name__ == "__main__":
    with one_message(logging.Formatter("%(message)s")):
        given = read_settings()
        with ddpkit.distributed(num_threads=1) as context:
            main(given, context)
