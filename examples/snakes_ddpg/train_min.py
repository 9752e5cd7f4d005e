"""Train three snakes to beat three others, in one file: the program to read first, and to copy.

On one process; on two; going on after Ctrl-C, on any number of ranks::

    python train_min.py
    torchrun --nproc_per_node=2 train_min.py
    torchrun --nproc_per_node=3 train_min.py

The game, what a snake sees of it and the scripted opponents are imported; the rest is here, and `main()` is the
program. The ranks share what one process would do: every rank draws the random numbers of all boards and takes those
of its own; a batch is drawn from all boards, and each rank computes the rows that lie on its own. So a run is the same
on any number of ranks, but for the rounding of sums: once that turns a move, the games differ as with another seed.

What to expect: README.md, beside this file, has the measured results.
"""

import argparse
import logging
import math
import sys
from copy import deepcopy
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[1]))  # where `shared` is, which all trainers share

from shared.program import OneLineParser, UserError, one_message
from snakes.evaluation import play_games, play_on_all_ranks
from snakes.features import DIRECTION, FEATURES, WAYS, see
from snakes.game import SNAKES, STEPS, Boards, Game
from snakes.opponents import OPPONENTS, Player

import ddpkit

log = logging.getLogger("snakes")

TEAM = 3  # snakes of a team; the first three learn
FIRST = 10  # steps of every board that are remembered when learning begins
HIDDEN = 128  # width of the networks
LEARNING_RATE = 3e-3  # of both networks at first; it falls to 0
GAMMA = 0.97  # discount per step
ENTROPY = 0.03  # its weight in the actor's loss: without it some actors settle before the critic knows anything
TAU = 0.01  # part of the way that the targets go per update
REPORT = 200  # updates between two evaluations, and checkpoints
KEPT = ("episodes", "boards", "rows", "memory", "opponent", "seed")  # flags with which a run goes on as it began


# Settings


def read_settings() -> argparse.Namespace:
    parser = OneLineParser("Trains three snakes to beat three others.", argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--episodes", type=int, default=6000, help="games of 200 steps, of all boards together")
    add("--boards", type=int, default=1024, help="games at once, of all ranks together")
    add("--rows", type=int, default=6144, help="transitions of single snakes per update, of all ranks together")
    add("--memory", type=int, default=200_000, help="transitions that are remembered, of all ranks together")
    add("--opponent", choices=OPPONENTS, default="greedy", help="who plays the other team")
    add("--games", type=int, default=400, help="in an evaluation, half of them on either side")
    add("--seed", type=int, default=1, help="of the weights and of all games")
    add("--folder", type=Path, default=Path("runs/train_min"), help="of the checkpoints; a run in it goes on")
    settings = parser.parse_args()
    for name in ("episodes", "boards", "rows", "memory", "games", "seed"):
        if getattr(settings, name) < 1:
            parser.error(f"--{name} must be at least 1, not {getattr(settings, name)}")
    if settings.folder.is_file():
        parser.error(f"--folder {settings.folder} is a file: name a folder, or a path not yet in use")
    if settings.boards < ddpkit.get_world_size():
        parser.error(f"--boards {settings.boards} is too few for {ddpkit.get_world_size()} ranks: one each at least")
    return settings


# Networks


def make_network() -> nn.Module:
    """Make a network from what a snake sees to a number for each of its ways: left, straight on, right."""
    return nn.Sequential(
        nn.Linear(FEATURES, HIDDEN),
        nn.ReLU(),
        nn.Linear(HIDDEN, HIDDEN),
        nn.ReLU(),
        nn.Linear(HIDDEN, WAYS),
    )


class Agent(nn.Module):
    """Hold an actor, which gives a snake's ways their probabilities, and a critic, which gives them their values."""

    def __init__(self) -> None:
        super().__init__()
        self.actor = nn.Sequential(make_network(), nn.Softmax(-1))
        self.critic = make_network()

    def play(self, boards: Boards, team: int, actions: np.ndarray) -> None:
        """Fill a team's columns of the actions (n, 6) with each snake's most probable way, as the opponents do."""
        ways = self.probabilities(see(boards, team)).argmax(-1)
        write_moves(boards, team, ways, actions)

    @torch.no_grad()
    def probabilities(self, seen: np.ndarray) -> np.ndarray:
        """Give the ways of what snakes see, (n, 3, FEATURES), their probabilities, (n, 3, WAYS)."""
        device = next(self.parameters()).device
        return self.actor(torch.from_numpy(seen).to(device)).cpu().numpy()


def write_moves(boards: Boards, team: int, ways: np.ndarray, actions: np.ndarray) -> None:
    """Turn ways (n, 3), seen along the snakes' headings, into directions in a team's columns of the actions (n, 6)."""
    snakes = slice(TEAM * team, TEAM * (team + 1))
    actions[:, snakes] = DIRECTION[boards.headings[:, snakes], ways]


# Play, and remember


class Batch(NamedTuple):
    """Hold transitions of single snakes, B rows."""

    seen: torch.Tensor  # (B, FEATURES)
    way: torch.Tensor  # (B, 1) int64, the one taken
    reward: torch.Tensor  # (B,): what the team gained on the other
    later: torch.Tensor  # (B, FEATURES), seen one step later


class Arena:
    """Hold this rank's boards, and what the learning team has seen and done on them in the last `moments` steps.

    `mine` are the numbers of these boards among all `total`. They start at different times of a game, so that a batch
    holds all parts of one.
    """

    def __init__(self, mine: range, total: int, moments: int, seed: int) -> None:
        self.own = slice(mine.start, mine.stop)
        self.total = total
        self.moments = moments
        self.game = Game(len(mine), seed, first=mine.start)
        self.game.boards.times[:] = np.array(mine) * STEPS // total
        shape = (len(mine), moments)
        self.seen = np.zeros((*shape, TEAM, FEATURES), np.float32)
        self.ways = np.zeros((*shape, TEAM), np.int64)
        self.rewards = np.zeros(shape, np.float32)
        self.ended = np.zeros(shape, np.bool_)  # the next moment is of another game

    def play(self, step: int, agent: Agent, opponent: Player, rng: np.random.Generator) -> None:
        """Play a step on all boards, by ways drawn by the actor's probabilities, and remember what came of it."""
        boards = self.game.boards
        seen = see(boards, 0)
        limits = agent.probabilities(seen).cumsum(-1)[..., :-1]
        draws = rng.random((self.total, TEAM, 1), np.float32)[self.own]
        ways = (draws >= limits).sum(-1)
        actions = np.empty((len(seen), SNAKES), np.uint8)
        write_moves(boards, 0, ways, actions)
        opponent(boards, 1, actions)
        self.game.step(actions)

        at = step % self.moments
        gains = self.game.rewards
        self.seen[:, at] = seen
        self.ways[:, at] = ways
        self.rewards[:, at] = gains[:, :TEAM].sum(1) - gains[:, TEAM:].sum(1)
        self.ended[:, at] = self.game.done
        self.game.reset(self.game.done)

    def sample(self, step: int, rows: int, rng: np.random.Generator, device: torch.device) -> Batch:
        """Draw rows from the moments of all ranks' boards, before a step, and return those on this rank's."""
        board = rng.integers(self.total, size=rows)
        snake = rng.integers(TEAM, size=rows)
        age = rng.integers(2, min(step, self.moments) + 1, size=rows)  # not 1, the last step, which nothing follows
        at = (step - age) % self.moments

        here = (board >= self.own.start) & (board < self.own.stop)
        board, snake, at = board[here] - self.own.start, snake[here], at[here]
        whole = ~self.ended[board, at]  # the last step of a game has none after it
        board, snake, at = board[whole], snake[whole], at[whole]
        arrays = Batch(
            seen=self.seen[board, at, snake],
            way=self.ways[board, at, snake][:, None],
            reward=self.rewards[board, at],
            later=self.seen[board, (at + 1) % self.moments, snake],
        )
        return Batch(*(torch.from_numpy(array).to(device) for array in arrays))

    def _tensors(self) -> dict[str, torch.Tensor]:
        """List all arrays, of which the first dimension is that of this rank's boards, as tensors on their memory."""
        own = {"seen": self.seen, "ways": self.ways, "rewards": self.rewards, "ended": self.ended}
        return {name: torch.from_numpy(array) for name, array in (self.game.boards._asdict() | own).items()}

    def state(self) -> dict[str, torch.Tensor]:
        """Gather the arrays of all ranks' boards, to be saved. Collective."""
        shares = ddpkit.all_gather(self._tensors())
        return {name: torch.cat([share[name] for share in shares]) for name in shares[0]}

    def load(self, state: dict[str, torch.Tensor]) -> None:
        """Restore this rank's part of the arrays of all boards, whatever ranks have saved them."""
        for name, tensor in self._tensors().items():
            tensor.copy_(state[name][self.own])


# Learn


def losses(agent: Agent, targets: Agent, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the actor's and the critic's loss, sums over the rows of a batch."""
    with torch.no_grad():
        later = targets.actor(batch.later) * targets.critic(batch.later)
        goal = batch.reward + GAMMA * later.sum(-1)
    values = agent.critic(batch.seen)
    critic_loss = (values.gather(1, batch.way).squeeze(1) - goal).square().sum()
    chances = agent.actor(batch.seen)
    entropy = -(chances * chances.clamp_min(1e-8).log()).sum()
    actor_loss = -(chances * values.detach()).sum() - ENTROPY * entropy
    return actor_loss, critic_loss


def share(count: int, job: ddpkit.Context) -> range:
    """Return the numbers of this rank's share of so many boards or games."""
    return range(count * job.rank // job.world_size, count * (job.rank + 1) // job.world_size)


def main(settings: argparse.Namespace, job: ddpkit.Context, stop: ddpkit.Stop) -> None:
    # The agent, the same on every rank, and the targets, which follow it slowly
    ddpkit.seed_everything(settings.seed)
    agent = Agent().to(job.device)
    targets = deepcopy(agent).requires_grad_(False)
    optimizer = torch.optim.Adam(agent.parameters(), lr=LEARNING_RATE)
    parts = {"agent": agent, "targets": targets, "optimizer": optimizer}

    # This rank's share of the boards
    opponent = OPPONENTS[settings.opponent]
    log.info("compiling what is not in Numba's cache yet; the first time that takes half a minute")
    with ddpkit.main_process_first(local=True):
        play_games(agent.play, opponent, games=1)
    moments = max(FIRST, settings.memory // (TEAM * settings.boards))
    arena = Arena(share(settings.boards, job), settings.boards, moments, settings.seed)

    # Go on with the run in the folder, or begin one, with something to remember
    flags = {name: getattr(settings, name) for name in KEPT}
    checkpoints = ddpkit.Checkpointer(settings.folder, keep=1)
    updates = math.ceil(settings.episodes * STEPS / settings.boards)
    done = 0
    saved = checkpoints.load_latest(**parts)
    if saved:
        if saved["flags"] != flags:
            began = " ".join(f"--{name} {value}" for name, value in saved["flags"].items())
            raise UserError(f"the run in {settings.folder} began with {began}: pass the same, or another --folder")
        arena.load(saved["arena"])
        done = saved["step"]
        log.info("goes on after update %d of %d, on %d rank(s)", done, updates, job.world_size)
    else:
        for step in range(FIRST):
            arena.play(step, agent, opponent, np.random.default_rng([settings.seed, step]))

    hides_bar = None if ddpkit.is_main_process() else True  # None: on a terminal it is shown
    bar = tqdm(initial=done, total=updates, unit="update", disable=hides_bar)
    stopped = False
    while done < updates and not stopped:
        step = FIRST + done
        rng = np.random.default_rng([settings.seed, step])  # the same on every rank
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * (1 - done / updates)

        # Update. The sum over this rank's rows is scaled so that the mean over ranks is the mean over all rows
        batch = arena.sample(step, settings.rows, rng, job.device)
        actor_loss, critic_loss = losses(agent, targets, batch)
        loss = (actor_loss + critic_loss) * job.world_size / settings.rows
        optimizer.zero_grad()
        loss.backward()
        with ddpkit.averaging(agent):  # while the gradients travel, the boards play on
            arena.play(step, agent, opponent, rng)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(list(targets.parameters()), list(agent.parameters()), TAU)
        done += 1
        bar.update()

        # Report and save, now and then and at the end; after a signal to any rank, all of them save and stop
        stopped = stop.now()
        is_due = done % REPORT == 0 or done == updates
        if is_due:
            totals = ddpkit.all_reduce([actor_loss.item(), critic_loss.item()])
            a_loss, c_loss = (total / settings.rows for total in totals)
            result = play_on_all_ranks(agent.play, {"": opponent}, settings.games, seed=2**31)[""]
            log.info("[update %d of %d] a_loss %.3f c_loss %.3f; %s", done, updates, a_loss, c_loss, result)
        if is_due or stopped:
            checkpoints.save(done, **parts, arena=arena.state(), flags=flags)
    bar.close()

    actor = {f"layers.{name}": value for name, value in agent.actor[0].state_dict().items()}
    ddpkit.run_on_main(torch.save, actor, settings.folder / "actor.pth")  # for play.py
    end = "stopped: the same command goes on" if done < updates else "done"
    log.info("%s after update %d of %d; the actor is in %s", end, done, updates, settings.folder / "actor.pth")


if __name__ == "__main__":
    with one_message(logging.Formatter("%(message)s")):
        given = read_settings()
        with ddpkit.distributed(num_threads=1) as job, ddpkit.stopping() as stop:
            main(given, job, stop)
        sys.exit(stop.exit_code)
