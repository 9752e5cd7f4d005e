"""What one rank has seen and done, in flat arrays allocated once, and the batches drawn from it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numba import njit

from .features import FEATURES, PER_WAY, WAYS

SNAKES = 3  # of the team that learns


class Batch(NamedTuple):
    """n-step transitions of single snakes, B rows; `value` stands for that of `later` under the target networks.

    The target of a row is `gained + weight * value(later)`: weight is gamma to the power of the steps between, 0 where
    the snake died on the way.
    """

    seen: torch.Tensor  # (B, FEATURES) float32
    way: torch.Tensor  # (B,) int64, the one taken
    gained: torch.Tensor  # (B,) float32, discounted
    weight: torch.Tensor  # (B,) float32
    later: torch.Tensor  # (B, FEATURES) float32


class Replay:
    """A ring of the last moments of all boards of this rank.

    A moment is what each snake sees, the way it takes, what that brings and whether it dies. A board that was done at
    the moment before only shows its end there and starts anew: nobody moves, the moment ends a transition but begins
    none.

    Args:
        moments: How many fit.
        boards: On this rank.

    Raises:
        ValueError: If not even one transition fits.
    """

    def __init__(self, moments: int, boards: int) -> None:
        if moments < 2:
            raise ValueError(
                f"a transition is between two moments of {boards} boards, which takes --buffer_size "
                f"{2 * SNAKES * boards} per rank, but there is room for {moments}: raise it, or play fewer boards"
            )
        shape = (moments, boards, SNAKES)
        self.seen = np.zeros((*shape, FEATURES), np.float32)
        self.ways = np.zeros(shape, np.uint8)
        self.rewards = np.zeros(shape, np.float32)
        self.died = np.zeros(shape, np.bool_)
        self.moved = np.zeros(shape[:2], np.bool_)
        self.count = 0  # moments added so far

    def __len__(self) -> int:
        """Transitions of single snakes that it holds."""
        return min(self.count, len(self.seen)) * self.ways[0].size

    def ready(self, size: int, steps: int) -> bool:
        """Whether it holds as many transitions as a batch needs, and one of so many steps; alike on every rank.

        Raises:
            ValueError: If it never can.
        """
        moments, boards = self.moved.shape
        if size > self.ways.size or steps >= moments:
            raise ValueError(
                f"a batch of {size} rows over {steps} steps does not fit {moments} moments of {boards} boards, "
                f"{self.ways.size} transitions per rank: raise --buffer_size, or lower the batch size or --n_step"
            )
        return len(self) >= size and min(self.count, moments) > steps

    def next(self) -> int:
        """The place of the moment to fill now; it counts from the next call on."""
        self.count += 1
        return (self.count - 1) % len(self.seen)

    def sample(self, size: int, steps: int, gamma: float, rng: np.random.Generator, device: torch.device) -> Batch:
        """Draws `size` transitions over up to `steps` steps, each mirrored or not by the toss of a coin.

        Raises:
            ValueError: If it is not `ready()`, or nobody has moved.
        """
        held = min(self.count, len(self.seen))
        oldest = (self.count - held) % len(self.seen)
        if not self.ready(size, steps) or not _any_moved(self.moved, oldest, held - steps):
            raise ValueError(
                f"the {held} moments held, {len(self)} transitions, do not make a batch of {size} rows over "
                f"{steps} steps: play on before the next update, or raise --buffer_size"
            )
        arrays = Batch(
            np.empty((size, FEATURES), np.float32),
            np.empty(size, np.int64),
            np.empty(size, np.float32),
            np.empty(size, np.float32),
            np.empty((size, FEATURES), np.float32),
        )
        ring = (self.seen, self.ways, self.rewards, self.died, self.moved)
        _sample(*ring, oldest, held, steps, gamma, rng, *arrays)
        return Batch(*(torch.from_numpy(array).to(device, non_blocking=True) for array in arrays))


@njit(cache=True)
def _any_moved(moved, oldest, moments):
    for i in range(moments):
        for b in range(moved.shape[1]):
            if moved[(oldest + i) % len(moved), b]:
                return True
    return False


@njit(cache=True, nogil=True)
def _sample(seen, ways, rewards, died, moved, oldest, held, steps, gamma, rng, now, way, gained, weight, later):
    row = 0
    while row < len(way):
        at = (oldest + rng.integers(0, held - steps)) % len(seen)
        b, k, mirrored = rng.integers(0, seen.shape[1]), rng.integers(0, seen.shape[2]), rng.integers(0, 2)
        if not moved[at, b]:
            continue
        _look(seen[at, b, k], mirrored, now[row])
        way[row] = WAYS - 1 - ways[at, b, k] if mirrored else ways[at, b, k]
        gained[row], weight[row] = 0, 1
        for _ in range(steps):
            gained[row] += weight[row] * rewards[at, b, k]
            weight[row] *= gamma * (not died[at, b, k])
            at = (at + 1) % len(seen)
            if weight[row] == 0 or not moved[at, b]:
                break
        _look(seen[at, b, k], mirrored, later[row])
        row += 1


@njit(cache=True)
def _look(seen, mirrored, out):
    """Copies what a snake sees, with left and right exchanged if mirrored."""
    out[:] = seen
    if mirrored:
        for way in range(WAYS):
            here, there = way * PER_WAY, (WAYS - 1 - way) * PER_WAY
            out[here : here + PER_WAY] = seen[there : there + PER_WAY]
