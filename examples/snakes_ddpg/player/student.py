"""Define the networks that learn from a search: one chooses ways, one foresees those of rivals, one values boards.

The first, the student, sees the board around a snake beside the 42 numbers. It is turned so that the snake's head is in
the middle and its heading points up; around the borders it goes on. A team's snakes choose in turn, and each one sees
where the mates before it are going.
"""

import numpy as np
import torch
from numba import njit
from snakes.ddpg import Actor, Policy
from snakes.features import DIRECTION, FEATURES, WAYS
from snakes.game import BEAN, CELLS, COLUMNS, NEXT, ROWS, SNAKES, Boards, segment
from torch import nn

SIDE = 15  # cells of the picture, each way
PLANES = 10
FAR = 20  # steps that count as never
_rows, _columns = np.divmod(np.arange(CELLS), COLUMNS)
_ahead, _right = np.mgrid[SIDE // 2 : -SIDE // 2 : -1, -(SIDE // 2) : SIDE // 2 + 1].reshape(2, -1)
_turned = ((-_ahead, _right), (_ahead, -_right), (-_right, -_ahead), (_right, _ahead))  # rows and columns, by heading
# AROUND[heading, head]: the cells of the picture, row by row
AROUND = np.stack(
    [(_rows[:, None] + down) % ROWS * COLUMNS + (_columns[:, None] + right) % COLUMNS for down, right in _turned]
).astype(np.uint8)


class Student(nn.Module):
    """Map pictures, (n, PLANES, SIDE, SIDE), and numbers, (n, FEATURES), to how good the ways are, (n, WAYS)."""

    def __init__(self, width: int = 64, hidden: int = 512) -> None:
        super().__init__()
        self.board = nn.Sequential(
            nn.Conv2d(PLANES, width, 3),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, stride=2),
            nn.ReLU(),
            nn.Conv2d(width, width, 3),
            nn.ReLU(),
            nn.Flatten(),
        )
        self.layers = nn.Sequential(
            nn.Linear(16 * width + FEATURES, hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden // 2),
            nn.ReLU(),
            nn.Linear(hidden // 2, WAYS),
        )

    def forward(self, pictures: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        board = self.board(pictures.contiguous(memory_format=torch.channels_last))
        return self.layers(torch.cat([board, numbers.to(board.dtype)], 1))


@njit(cache=True, nogil=True)
def draw(boards, s, ways, pictures):
    """Fill `pictures`, float32 of shape (n, PLANES, SIDE * SIDE), with what snake `s` sees on each board.

    The mates before it go the `ways`, (n, 6), of which the others are not read.
    """
    leaves = np.empty(CELLS, np.int64)  # the step in which each cell is free again
    steps = np.empty((3, CELLS), np.int64)  # in which the snake, its mates and its rivals can be there
    planes = np.empty((CELLS, PLANES), np.float32)
    queue = np.empty(CELLS, np.int64)
    for b in range(len(pictures)):
        leaves[:] = 0
        planes[:] = 0
        for other in range(SNAKES):
            kind = 0 if other == s else 1 if other // 3 == s // 3 else 2
            length = np.int64(boards.lengths[b, other])
            for i in range(length):
                cell = segment(boards, b, other, i)
                leaves[cell] = length - i
                planes[cell, 1 + kind] = min(1.0, (length - i) / FAR)
            if kind:
                planes[segment(boards, b, other, 0), 6 + kind] = (length - 1) / 10
            if kind == 1 and other < s:
                way = DIRECTION[boards.headings[b, other], ways[b, other]]
                planes[NEXT[segment(boards, b, other, 0), way], 9] = 1
        for kind in range(3):
            _reach(boards, b, s, kind, leaves, steps[kind], queue)
        for cell in range(CELLS):
            planes[cell, 0] = boards.cells[b, cell] >= BEAN
            for kind in range(3):
                planes[cell, 4 + kind] = 1 - steps[kind, cell] / FAR
        around = AROUND[boards.headings[b, s], segment(boards, b, s, 0)]
        for i, cell in enumerate(around):
            for plane in range(PLANES):
                pictures[b, plane, i] = planes[cell, plane]


@njit(cache=True)
def _reach(boards, b, s, kind, leaves, steps, queue):
    """Fill the step in which each cell can be reached, FAR if not before: by snake `s`, its mates or its rivals."""
    steps[:] = FAR
    known = 0
    for other in range(SNAKES):
        is_mate = other // 3 == s // 3
        if (other == s) == (kind == 0) and is_mate == (kind < 2):
            queue[known] = segment(boards, b, other, 0)
            steps[queue[known]] = 0
            known += 1
    looked_at = 0
    while looked_at < known:
        at = queue[looked_at]
        looked_at += 1
        step = steps[at] + 1
        if step >= FAR:
            break
        for cell in NEXT[at]:
            if steps[cell] == FAR and leaves[cell] <= step:
                steps[cell] = step
                queue[known] = cell
                known += 1


def look(boards: Boards, s: int, ways: np.ndarray) -> np.ndarray:
    """Draw what a snake sees of each board, (n, PLANES, SIDE, SIDE); the mates before it go the `ways`, (n, 6)."""
    pictures = np.empty((len(boards.times), PLANES, SIDE * SIDE), np.float32)
    draw(boards, s, ways, pictures)
    return pictures.reshape(-1, PLANES, SIDE, SIDE)


class Value(nn.Module):
    """Map what all six snakes see, (n, 6, FEATURES), a team's first, to what that team may expect, (n,)."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.own, self.others = (
            nn.Sequential(nn.Linear(FEATURES, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
            for _ in range(2)
        )
        self.both = nn.Sequential(nn.Linear(2 * hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def forward(self, seen: torch.Tensor) -> torch.Tensor:
        own, others = seen.split(3, dim=1)
        return self.both(torch.cat([self.own(own).mean(1), self.others(others).mean(1)], -1)).squeeze(-1)


class Learners(nn.Module):
    """Hold the student, the actor that foresees the ways of rivals, and the value."""

    def __init__(self, hidden: int = 128) -> None:
        super().__init__()
        self.student = Student()
        self.rivals = Actor(hidden)
        self.value = Value(hidden)


class StudentPolicy(Policy):
    """Play as one team by a student's best ways, of which the snakes choose in turn."""

    def __init__(self, student: Student, bfloat16: bool = False) -> None:
        super().__init__(student)
        self.bfloat16 = bfloat16

    @torch.no_grad()
    def plan(self, boards: Boards, team: int) -> tuple[np.ndarray, np.ndarray]:
        """Choose in turn; otherwise as another policy."""
        numbers = self.look(boards, team)
        ratings = np.empty((len(numbers), 3, WAYS), np.float32)
        ways = np.zeros((len(numbers), SNAKES), np.uint8)
        for k in range(3):
            s = 3 * team + k
            pictures = torch.from_numpy(look(boards, s, ways)).to(numbers.device)
            with torch.autocast(numbers.device.type, torch.bfloat16, enabled=self.bfloat16):
                ratings[:, k] = self.actor(pictures, numbers[:, k]).float().numpy(force=True)
            ways[:, s] = ratings[:, k].argmax(1)
        return ways, ratings
