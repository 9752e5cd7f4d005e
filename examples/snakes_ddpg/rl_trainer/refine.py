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
from snakes.features import DIRECTION, FEATURES, PER_WAY, WAYS
from snakes.game import SNAKES, STEPS, Boards, Game
from snakes.opponents import Player
from snakes.search import DEPTH, GAMMA, Search, expect, load_search

import ddpkit

log = logging.getLogger("snakes")
SCRIPTED = ("territory", "foresighted", "sharing")
OTHERS = len(SCRIPTED) + 2  # with the model itself and an earlier one
WANDER = 0.02  # part of the moves to any free cell, so that the critics see what follows those too


def read_settings(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser("Fits critics to a trained model's play with its search.")
    parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    add = parser.add_argument
    add("model", help="path of an actor_*.pth, a run's folder, runN, runN:EPISODE, or latest")
    add("--games", type=int, default=1280, help="to learn from, global")
    add("--episode_length", type=int, default=STEPS, help="steps of a game")
    add("--depth", type=int, default=DEPTH, help="steps that the search looks ahead")
    add("--epochs", type=int, default=4, help="how often it learns from each step of them")
    add("--batch", type=int, default=2730, help="boards per optimiser step, global")
    add("--lr", type=float, default=1e-3, help="learning rate at first; it falls evenly")
    add("--seed", type=int, default=1, help="of the games and of the order in which it learns from them")
    return parser.parse_args(argv)


class Wanderer:
    """Play as a search does, but for some moves to any free cell.

    Args:
        player: The search.
        seed: Of these moves.
        games: Those that all ranks play, for which it draws alike on any number of them.
        share: This rank's among them.
    """

    def __init__(self, player: Search, seed: int, games: int, share: slice) -> None:
        self.player = player
        self.rng = np.random.default_rng(seed)
        self.games = games
        self.share = share

    def __call__(self, boards: Boards, team: int, actions: np.ndarray) -> None:
        self.player(boards, team, actions)
        seen = self.player.look(boards, team).numpy()
        free = seen[..., : WAYS * PER_WAY : PER_WAY] > 0
        drawn = self.rng.random((self.games, 3, WAYS + 1))[self.share]
        ways = (free * drawn[..., :WAYS]).argmax(-1)
        wanders = free.any(-1) & (drawn[..., WAYS] < WANDER)
        snakes = slice(3 * team, 3 * team + 3)
        anywhere = DIRECTION[boards.headings[:, snakes], ways]
        actions[:, snakes] = np.where(wanders, anywhere, actions[:, snakes])


class Played(NamedTuple):
    """What came of some games, for one of the teams."""

    seen: np.ndarray  # by all snakes before each step, the team's first: (steps, games, 6, FEATURES)
    returns: np.ndarray  # what the team gained on the other from there on, discounted: (steps, games)
    whole: np.ndarray  # whether the game came to its end; boards may be too full before: (games,)


def play(search: Search, player: Player, other: Player, side: int, game: Game) -> Iterator[Played]:
    """Play the boards to their end; give what came of it for each team that searches.

    What the critic expects at the end is added to the returns.
    """
    teams = [side, 1 - side] if isinstance(other, Wanderer) else [side]
    seen = [[] for _ in teams]
    leads = [np.zeros(len(game.done))]  # of team A, before each step and at the end
    actions = np.zeros((len(game.done), SNAKES), np.uint8)
    whole = np.ones(len(game.done), np.bool_)
    for _ in range(game.episode_length):
        for place, team in enumerate(teams):
            both = [search.look(game.boards, each) for each in (team, 1 - team)]
            seen[place].append(torch.cat(both, dim=1).numpy())
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
        own = search.look(game.boards, team)
        with torch.no_grad():
            later = expect(search.critic, search.actor(own), own).numpy()
        returns = np.empty_like(gains)
        for step in reversed(range(len(gains))):
            later = gains[step] * (1 - 2 * team) + GAMMA * later
            returns[step] = later
        yield Played(np.stack(seen[place]), returns, whole)


def others_of(search: Search, model: Path) -> list[tuple[str, Player]]:
    """List whom it plays, in as many games each: scripted players, itself, and the model of half its run.

    Where there is no model of the half, those are one fewer.
    """
    found = [(name, opponents.get(name)) for name in SCRIPTED]
    found.append(("itself", search))
    numbers = [name for name in runs.list_models(model.parents[1]) if name != "best"]
    if numbers:
        earlier = numbers[len(numbers) // 2]
        found.append((f"its episode {earlier}", load_search(model.with_name(f"actor_{earlier}.pth"), search.depth)))
    return found


def collect(search: Search, model: Path, settings: argparse.Namespace, share: slice) -> list[Played]:
    """Play this rank's share of the games on either side against each of the others."""
    games = games_of_a_side(settings)
    parts: list[Played] = []
    for place, (name, other) in enumerate(others_of(search, model)):
        for side in (0, 1):
            number = 2 * place + side
            player = Wanderer(search, ddpkit.sample_seed(settings.seed, 1, number), games, share)
            rival = other
            if isinstance(other, Search):
                rival = Wanderer(other, ddpkit.sample_seed(settings.seed, 2, number), games, share)
            seed = ddpkit.sample_seed(settings.seed, 3, number)
            size = share.stop - share.start
            game = Game(size, seed, first=share.start, episode_length=settings.episode_length)
            parts += play(search, player, rival, side, game)
        log.info("played %d games with %s", 2 * games, name)
    return parts


def games_of_a_side(settings: argparse.Namespace) -> int:
    """Return how many games are played on one side against one of the others, by all ranks."""
    return settings.games // (2 * OTHERS)


def draw(parts: list[Played], rng: np.random.Generator, size: int, games: int, share: slice) -> tuple[Tensor, Tensor]:
    """Draw steps of all ranks' games; return those of this rank's: what was seen, and the returns.

    On every rank the generator is in one state, so that all draw the same steps, on any number of ranks.
    """
    part = rng.integers(0, len(parts), size)
    step = rng.integers(0, len(parts[0].returns), size)
    game = rng.integers(0, games, size) - share.start
    mine = (game >= 0) & (game < share.stop - share.start)
    drawn = [(parts[p], t, g) for p, t, g in zip(part[mine], step[mine], game[mine], strict=True)]
    rows = [(played.seen[t, g], played.returns[t, g]) for played, t, g in drawn if played.whole[g]]
    seen = np.array([each for each, _ in rows], np.float32).reshape(-1, SNAKES, FEATURES)
    return torch.from_numpy(seen), torch.tensor([each for _, each in rows], dtype=torch.float32)


def fit(search: Search, parts: list[Played], settings: argparse.Namespace, share: slice) -> None:
    """Fit the critics of the team and of the rivals, their difference, to the returns. Collective."""
    networks = nn.ModuleList([search.critic, search.rival])
    optimizer = torch.optim.Adam(networks.parameters(), lr=settings.lr)
    rng = np.random.default_rng(ddpkit.sample_seed(settings.seed, 4, 0))
    games = games_of_a_side(settings)
    rows = len(parts) * settings.episode_length * games
    steps = max(1, settings.epochs * rows // settings.batch)
    report = max(1, steps // settings.epochs)
    errors = torch.zeros(2)  # their squares' sum, and their number
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = settings.lr * (1 - step / steps)
        both, returns = draw(parts, rng, settings.batch, games, share)
        with torch.no_grad():
            chances = search.actor(both)
        own = expect(search.critic, chances[:, :3], both[:, :3])
        theirs = expect(search.rival, chances[:, 3:], both[:, 3:])
        squares = (own - theirs - returns).square().sum()
        optimizer.zero_grad()
        ddpkit.global_mean(squares, len(returns)).backward()
        ddpkit.average_gradients(networks)
        nn.utils.clip_grad_norm_(networks.parameters(), 1.0)
        optimizer.step()
        errors += torch.tensor([squares.item(), len(returns)])
        if (step + 1) % report == 0:
            total, number = ddpkit.all_reduce(errors).tolist()
            log.info("step %d of %d: mean squared error %.2f", step + 1, steps, total / number)
            errors.zero_()
    ddpkit.check_replicas(networks, optimizer)


@user_error("cannot start", ValueError, OSError)
def prepare(settings: argparse.Namespace) -> Path:
    """Check the settings and find the model."""
    for name in ("games", "episode_length", "depth", "epochs", "batch"):
        if getattr(settings, name) < 1:
            raise ValueError(f"--{name} must be at least 1, not {getattr(settings, name)}")
    least = 2 * OTHERS * ddpkit.get_world_size()
    if settings.games < least:
        raise ValueError(f"--games must be at least {least} here, so that each rank has some, not {settings.games}")
    model = runs.parse(settings.model, refined=False)
    if model.parent.name != runs.MODELS:
        raise ValueError(f"{model} is in no run's folder, where its critics are written: move it to RUN/{runs.MODELS}/")
    return model


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
    shares = np.array_split(np.arange(games_of_a_side(settings)), job.world_size)
    share = slice(int(shares[job.rank][0]), int(shares[job.rank][-1]) + 1)
    parts = collect(search, model, settings, share)
    search.rival = deepcopy(search.critic)
    fit(search, parts, settings, share)
    ddpkit.run_on_main(save, search, model.parents[1])
    log.info("wrote %s", model.with_name("actor_refined.pth"))


if __name__ == "__main__":
    with one_message(logging.Formatter("%(message)s")):
        given = read_settings()
        with ddpkit.distributed(num_threads=1) as context:
            main(given, context)
