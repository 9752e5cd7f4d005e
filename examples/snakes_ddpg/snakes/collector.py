"""Play this rank's share of the boards, remember what the snakes of team A lived, and draw batches from it."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numba import njit
from torch import nn

from .features import DIRECTION, FEATURES, WAYS, observe
from .game import SNAKES, START_LENGTH, Game, draw
from .opponents import Player, ask

TEAM = 0  # the side that learns; what it sees does not depend on the side
MATES = 3  # snakes of that team


class Collector:
    """Hold boards and their replay.

    The boards start at different times of an episode, so that a batch holds all parts of one. A board's first, shorter
    episode is not counted.

    Args:
        boards: Numbers of this rank's boards among all `total`; a number plays the same game on any rank.
        transitions: Of single snakes that the replay holds.
    """

    def __init__(self, boards: range, total: int, seed: int, *, episode_length: int, transitions: int) -> None:
        self.game = Game(len(boards), seed, first=boards.start, episode_length=episode_length)
        self.game.boards.times[:] = np.array(boards) * episode_length // total
        self.replay = Replay(transitions // (3 * len(boards)), len(boards))
        self._whole = self.game.boards.times == 0
        self._numbers = np.array(boards)
        self._actions = np.zeros((len(boards), SNAKES), np.uint8)

    @torch.no_grad()
    def play(self, actor: nn.Module, players: Sequence[Player], epsilon: float) -> Counter:
        """Play one step on all boards.

        Args:
            actor: Chooses for team A.
            players: Play team B, each on as many of all boards.
            epsilon: Part of the moves of team A that is random.

        Returns:
            Sums over this rank's boards: `environment_steps` and the team's `deaths` in them; over the episodes that
            ended, `episodes`, `wins`, the rewards `snake_1` to `snake_3` and the `opponent`'s reward.
        """
        game = self.game
        replay = self.replay
        device = next(actor.parameters()).device
        at = replay.next()
        observe(game.boards, TEAM, replay.seen[at])
        probabilities = actor(torch.from_numpy(replay.seen[at]).to(device)).cpu().numpy()
        explore(game.boards, TEAM, probabilities, epsilon, replay.ways[at], self._actions)
        for place, player in enumerate(players):
            which = np.flatnonzero(self._numbers % len(players) == place)
            ask(player, game.boards, 1 - TEAM, which, self._actions)

        over = game.done.copy()  # at the moment before: these boards show their end now, and begin an episode
        game.step(self._actions)
        game.reset(over)
        game.done[over] = False
        game.died[over] = False
        replay.moved[at] = ~over
        replay.rewards[at] = game.rewards[:, :3].sum(1) - game.rewards[:, 3:].sum(1)

        gains = game.boards.lengths[game.done & self._whole].astype(np.int64) - START_LENGTH
        ours, theirs = gains[:, :3].sum(1), gains[:, 3:].sum(1)
        self._whole |= over
        return Counter(
            episodes=len(gains),
            environment_steps=int((~over).sum()),
            deaths=int(game.died[:, :3].sum()),
            wins=int((ours > theirs).sum()),
            snake_1=int(gains[:, 0].sum()),
            snake_2=int(gains[:, 1].sum()),
            snake_3=int(gains[:, 2].sum()),
            opponent=int(theirs.sum()),
        )


@njit(cache=True, nogil=True)
def explore(boards, team, probabilities, epsilon, ways, actions):
    """Draw a way for each snake of a team, from the boards' own streams: any of the three with probability `epsilon`.

    Else it follows the probabilities, float32 of shape (n, 3, 3). Fill `ways`, (n, 3), and the team's columns of
    `actions`, (n, 6), both uint8.
    """
    for b in range(len(ways)):
        for k in range(3):
            way = draw(boards, b, WAYS)
            if draw(boards, b, 1 << 15) >= epsilon * (1 << 15):
                left = draw(boards, b, 1 << 15) / (1 << 15)
                way = 0
                while way < WAYS - 1 and left >= probabilities[b, k, way]:
                    left -= probabilities[b, k, way]
                    way += 1
            ways[b, k] = way
            actions[b, 3 * team + k] = DIRECTION[boards.headings[b, 3 * team + k], way]


class Batch(NamedTuple):
    """Hold transitions of single snakes, B rows."""

    seen: torch.Tensor  # (B, FEATURES) float32
    way: torch.Tensor  # (B,) int64, the one taken
    reward: torch.Tensor  # (B,) float32: what the team gains on the other
    later: torch.Tensor  # (B, FEATURES) float32


class Replay:
    """Hold the last moments of all boards of this rank, in a ring.

    A moment is what each snake sees, the way it takes, and what that brings its team. A board that was done at the
    moment before only shows its end and starts a new episode: the moment ends a transition but begins none.

    Raise a ValueError if fewer than three `moments` fit: of two the first may be the one at which no board moves.
    """

    def __init__(self, moments: int, boards: int) -> None:
        if moments < 3:
            raise ValueError(
                f"a batch is drawn from at least three moments of {boards} boards, which takes --buffer_size "
                f"{3 * MATES * boards} per rank, but there is room for {moments}: raise it, or play fewer boards"
            )
        shape = (moments, boards, MATES)
        self.seen = np.zeros((*shape, FEATURES), np.float32)
        self.ways = np.zeros(shape, np.uint8)
        self.rewards = np.zeros(shape[:2], np.float32)
        self.moved = np.zeros(shape[:2], np.bool_)
        self.count = 0  # moments added so far

    def __len__(self) -> int:
        """Count the transitions of single snakes that it holds."""
        return min(self.count, len(self.seen)) * self.ways[0].size

    def next(self) -> int:
        """Return the place of the moment to fill now, which counts from here on."""
        self.count += 1
        return (self.count - 1) % len(self.seen)

    def ready(self, size: int) -> bool:
        """Tell if it holds as many transitions as a batch needs, alike on every rank; raise if it never can."""
        moments, boards = self.moved.shape
        if size > self.ways.size:
            raise ValueError(
                f"a batch of {size} rows does not fit {moments} moments of {boards} boards, {self.ways.size} "
                "transitions per rank: raise --buffer_size, or lower the batch size"
            )
        return self.count > 1 and len(self) >= size

    def sample(self, size: int, rng: np.random.Generator, device: torch.device) -> Batch:
        """Draw transitions, all with the same probability, with this rank's random numbers."""
        held = min(self.count, len(self.seen))
        begins = (self.count - held + np.arange(held - 1)) % len(self.seen)  # the last one ends transitions only
        rows = _draw(self.moved, begins, MATES, size, rng)
        rows_later = (rows + self.ways[0].size) % self.ways.size
        seen = self.seen.reshape(-1, FEATURES)
        batch = Batch(
            seen=seen.take(rows, 0),
            way=self.ways.take(rows).astype(np.int64),
            reward=self.rewards.take(rows // MATES),
            later=seen.take(rows_later, 0),
        )
        return Batch(*(torch.from_numpy(array).to(device, non_blocking=True) for array in batch))


@njit(cache=True, nogil=True)
def _draw(moved, begins, snakes, size, rng):
    """Draw snakes that moved at moments of `begins`, as rows of all that is held. To take these then is quicker."""
    rows = np.empty(size, np.int64)
    row = 0
    while row < size:
        at = begins[rng.integers(0, len(begins))]
        board = rng.integers(0, moved.shape[1])
        snake = rng.integers(0, snakes)
        if moved[at, board]:
            rows[row] = (at * moved.shape[1] + board) * snakes + snake
            row += 1
    return rows
