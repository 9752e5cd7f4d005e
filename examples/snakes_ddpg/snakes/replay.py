"""Remember what one rank has seen and done, in flat arrays allocated once, and draw batches from it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numba import njit

from .features import FEATURES

SNAKES = 3  # of the team that learns


class Batch(NamedTuple):
    """Hold transitions of single snakes, B rows. A row's target is `reward + weight * value of later`."""

    seen: torch.Tensor  # (B, FEATURES) float32
    way: torch.Tensor  # (B,) int64, the one taken
    reward: torch.Tensor  # (B,) float32
    weight: torch.Tensor  # (B,) float32: gamma, or 0 if the snake died
    later: torch.Tensor  # (B, FEATURES) float32


class Replay:
    """Hold the last moments of all boards of this rank, in a ring.

    A moment is what each snake sees, the way it takes, what that brings and whether it dies. A
    board that was done at the moment before only shows its end there and starts anew: nobody moves,
    the moment ends a transition but begins none.

    Args:
        moments: How many fit.
        boards: On this rank.

    Raises:
        ValueError: If fewer than three fit; of two the first may be the one at which no board
            moves.
    """

    def __init__(self, moments: int, boards: int) -> None:
        if moments < 3:
            raise ValueError(
                f"a batch is drawn from at least three moments of {boards} boards, which takes --buffer_size "
                f"{3 * SNAKES * boards} per rank, but there is room for {moments}: raise it, or play fewer boards"
            )
        shape = (moments, boards, SNAKES)
        self.seen = np.zeros((*shape, FEATURES), np.float32)
        self.ways = np.zeros(shape, np.uint8)
        self.rewards = np.zeros(shape, np.float32)
        self.died = np.zeros(shape, np.bool_)
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
        """Tell if it holds as many transitions as a batch needs; alike on every rank.

        Raises:
            ValueError: If it never can.
        """
        moments, boards = self.moved.shape
        if size > self.ways.size:
            raise ValueError(
                f"a batch of {size} rows does not fit {moments} moments of {boards} boards, {self.ways.size} "
                "transitions per rank: raise --buffer_size, or lower the batch size"
            )
        return self.count > 1 and len(self) >= size

    def sample(self, size: int, gamma: float, rng: np.random.Generator, device: torch.device) -> Batch:
        """Draw transitions, all with the same probability.

        Args:
            size: How many.
            gamma: Discount per step.
            rng: Of this rank.
            device: Where to put them.

        Raises:
            ValueError: If it is not `ready()`, or nobody has moved.
        """
        held = min(self.count, len(self.seen))
        begins = (self.count - held + np.arange(held - 1)) % len(self.seen)  # the last one ends transitions only
        if not self.ready(size) or not self.moved[begins].any():
            raise ValueError(
                f"the {held} moments held, {len(self)} transitions, do not make a batch of {size} rows: play on before "
                "the next update, or raise --buffer_size"
            )
        rows = _draw(self.moved, begins, SNAKES, size, rng)
        rows_later = (rows + self.ways[0].size) % self.ways.size
        seen = self.seen.reshape(-1, FEATURES)
        batch = Batch(
            seen=seen.take(rows, 0),
            way=self.ways.take(rows).astype(np.int64),
            reward=self.rewards.take(rows),
            weight=np.where(self.died.take(rows), 0, gamma).astype(np.float32),
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
