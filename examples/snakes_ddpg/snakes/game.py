"""Play the game: its rules as plain loops over many boards at once, compiled by Numba.

Six snakes move on a torus of 10 x 20 cells; 0, 1, 2 are team A and 3, 4, 5 team B. A cell is a number from 0 to 199,
row by row; a direction is one of UP, DOWN, LEFT, RIGHT. Every board draws from its own random stream, so that a game
depends on its seed and its moves alone, not on the boards beside it.
"""

from typing import NamedTuple

import numpy as np
from numba import njit

import ddpkit

ROWS = 10
COLUMNS = 20
SNAKES = 6
BEANS = 5
STEPS = 200
CELLS = ROWS * COLUMNS
UP, DOWN, LEFT, RIGHT = 0, 1, 2, 3
START_LENGTH = 3
BEAN = np.uint8(128)  # what a bean adds to a cell's number of segments
NONE = np.uint8(255)  # no cell

_board = np.arange(CELLS, dtype=np.uint8).reshape(ROWS, COLUMNS)
_beside = [np.roll(_board, shift, axis) for axis in (0, 1) for shift in (1, -1)]  # up, down, left, right
NEXT = np.stack(_beside, axis=-1).reshape(CELLS, 4)  # NEXT[cell, direction] is the cell one step on
OPPOSITE = np.array([DOWN, UP, RIGHT, LEFT], np.uint8)
_SEARCH = np.array([RIGHT, DOWN, UP, LEFT], np.uint8)  # the order in which a respawn looks around

# a call that hands over Boards, eight arrays, would cost more than most of these functions do
_inlined = njit(cache=True, forceinline=True)


class Boards(NamedTuple):
    """Hold the state of n boards. Segment i of a snake, 0 the head, is `bodies[b, s, (heads[b, s] + i) % 256]`."""

    cells: np.ndarray  # (n, 200) uint8: number of segments there, plus BEAN
    bodies: np.ndarray  # (n, 6, 256) uint8: rings of cells
    heads: np.ndarray  # (n, 6) uint8: where in its ring the head is
    lengths: np.ndarray  # (n, 6) uint8
    headings: np.ndarray  # (n, 6) uint8
    beans: np.ndarray  # (n, 5) uint8: cells, NONE if eaten
    times: np.ndarray  # (n,) int32: steps played
    streams: np.ndarray  # (n,) uint64: states of the random streams

    def pick(self, which: np.ndarray) -> "Boards":
        """Copy some of the boards, by their numbers or a mask."""
        return Boards(*(array[which] for array in self))


@_inlined
def draw(boards, b, n):
    """Draw a uniform integer below n (n < 2**16), from the board's own stream (SplitMix64)."""
    boards.streams[b] += np.uint64(0x9E3779B97F4A7C15)
    z = boards.streams[b]
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return np.int64(((z >> np.uint64(32)) * np.uint64(n)) >> np.uint64(32))


@_inlined
def segment(boards, b, s, i):
    """Find the cell of a snake's i-th segment; 0 is the head."""
    return boards.bodies[b, s, np.uint8(boards.heads[b, s] + i)]


@_inlined
def _place(boards, b, s, head, neck, tail, heading):
    """Put a snake of three cells on a board."""
    boards.heads[b, s] = 0
    boards.lengths[b, s] = START_LENGTH
    boards.headings[b, s] = heading
    for i, cell in enumerate((head, neck, tail)):
        boards.bodies[b, s, i] = cell
        boards.cells[b, cell] += 1


@_inlined
def _refill_beans(boards, b):
    """Draw the missing beans, uniformly over the free cells."""
    for i in range(BEANS):
        while boards.beans[b, i] == NONE:
            cell = draw(boards, b, CELLS)
            if boards.cells[b, cell] == 0:
                boards.beans[b, i] = cell
                boards.cells[b, cell] = BEAN


@njit(cache=True, nogil=True)
def _reset(boards, which):
    """Start a new episode on the boards of a mask."""
    for b in np.flatnonzero(which):
        boards.cells[b] = 0
        boards.beans[b] = NONE
        boards.times[b] = 0
        for s in range(SNAKES):
            while True:  # redraw until nothing overlaps
                tail = np.uint8(draw(boards, b, CELLS))
                heading = draw(boards, b, 4)
                neck = NEXT[tail, heading]
                head = NEXT[neck, heading]
                if boards.cells[b, tail] == 0 and boards.cells[b, neck] == 0 and boards.cells[b, head] == 0:
                    break
            _place(boards, b, s, head, neck, tail, heading)
        _refill_beans(boards, b)


@_inlined
def _respawn(boards, b, s):
    """Put a removed snake back, without randomness; return False if there is no place for it."""
    for start in range(CELLS):
        if boards.cells[b, start] != 0:
            continue
        found = boards.bodies[b, s]
        found[0] = start
        known = 1
        looked_at = 0
        while looked_at < known < START_LENGTH:  # breadth first
            for direction in _SEARCH:
                cell = NEXT[found[looked_at], direction]
                if known < START_LENGTH and boards.cells[b, cell] == 0 and cell != start:
                    found[known] = cell
                    known += 1
            looked_at += 1
        if known == START_LENGTH:
            head, neck, tail = found[0], found[1], found[2]
            if neck // COLUMNS != tail // COLUMNS and neck % COLUMNS != tail % COLUMNS:  # the corner of an L
                head, neck = neck, head
            _place(boards, b, s, head, neck, tail, _heading(head, neck))
            return True
    return False


@_inlined
def _heading(head, neck):
    """Find a heading from raw coordinates, as the original does: across the border it points into the neck."""
    if head // COLUMNS == neck // COLUMNS:
        return RIGHT if head > neck else LEFT
    return DOWN if head > neck else UP


@_inlined
def _bury(boards, b, rewards, died):
    """Remove all dead, then put them back; return False if there is no place for one."""
    for s in range(SNAKES):
        if died[b, s]:
            rewards[b, s] += START_LENGTH - boards.lengths[b, s]  # with this step's bean taken back
            for i in range(boards.lengths[b, s]):
                boards.cells[b, segment(boards, b, s, i)] -= 1
    placed = True
    for s in range(SNAKES):
        if died[b, s] and not _respawn(boards, b, s):
            boards.lengths[b, s] = 0
            placed = False
    return placed


@_inlined
def _move(boards, b, actions, rewards, died):
    """Play a step of one board but for the new beans, and put what was drawn in place of reversals.

    Return False if the board is too full to go on.
    """
    cells = boards.cells
    for s in range(SNAKES):
        action = actions[b, s]
        back = OPPOSITE[boards.headings[b, s]]
        if action == back:  # a reversal becomes one of the three other directions
            action = np.uint8(draw(boards, b, 3))
            action += np.uint8(action >= back)
            actions[b, s] = action
        boards.headings[b, s] = action

        head = NEXT[segment(boards, b, s, 0), action]
        if cells[b, head] >= BEAN:
            rewards[b, s] = 1
            cells[b, head] -= BEAN
            for i in range(BEANS):
                if boards.beans[b, i] == head:
                    boards.beans[b, i] = NONE
            boards.lengths[b, s] += 1
        else:
            rewards[b, s] = 0
            cells[b, segment(boards, b, s, boards.lengths[b, s] - 1)] -= 1
        boards.heads[b, s] -= 1
        boards.bodies[b, s, boards.heads[b, s]] = head
        cells[b, head] += 1

    for s in range(SNAKES):
        died[b, s] = cells[b, segment(boards, b, s, 0)] > 1  # a bean there is eaten by now
    placed = _bury(boards, b, rewards, died)
    boards.times[b] += 1
    return placed and boards.lengths[b].sum() <= CELLS - BEANS


@njit(cache=True, nogil=True)
def _step(boards, actions, rewards, died, done, limit):
    for b in range(len(done)):
        done[b] = not _move(boards, b, actions, rewards, died)
        if not done[b]:
            _refill_beans(boards, b)
            done[b] = boards.times[b] >= limit


@njit(cache=True, nogil=True)
def foresee(boards, actions, rewards, died):
    """Move all snakes of boards, as a step does, but draw no new beans: nobody knows where they will be."""
    for b in range(len(actions)):
        _move(boards, b, actions, rewards, died)


class Game:
    """Play `count` boards side by side; `rewards`, `died` and `done` are those of the last step.

    Args:
        count: Number of boards.
        seed: Of all boards; each has a stream of its own.
        first: Number of the first board among all that are played with this seed, on whatever rank.
        episode_length: Steps after which a board is done.
    """

    def __init__(self, count: int, seed: int = 0, *, first: int = 0, episode_length: int = STEPS) -> None:
        if count < 1 or episode_length < 1:
            raise ValueError(f"count and episode_length must be at least 1, not {count} and {episode_length}")
        self.boards = Boards(
            cells=np.zeros((count, CELLS), np.uint8),
            bodies=np.zeros((count, SNAKES, 256), np.uint8),
            heads=np.zeros((count, SNAKES), np.uint8),
            lengths=np.zeros((count, SNAKES), np.uint8),
            headings=np.zeros((count, SNAKES), np.uint8),
            beans=np.full((count, BEANS), NONE),
            times=np.zeros(count, np.int32),
            streams=np.array([ddpkit.sample_seed(seed, 0, first + b) for b in range(count)], np.uint64),
        )
        self.rewards = np.zeros((count, SNAKES), np.int16)  # +1 for a bean; at death 3 - the length before this step
        self.died = np.zeros((count, SNAKES), np.bool_)
        self.done = np.zeros(count, np.bool_)
        self.episode_length = episode_length
        self.reset()

    def reset(self, which: np.ndarray | None = None) -> None:
        """Start a new episode on the boards of a mask of shape (n,), on all without one."""
        if which is None:
            which = np.ones(len(self.done), np.bool_)
        _reset(self.boards, which)

    def step(self, actions: np.ndarray) -> None:
        """Move all snakes by actions of shape (n, 6), uint8, 0 to 3, in which reversals become the directions taken.

        A board that is done must be reset before its next step.
        """
        if actions.shape != self.died.shape or actions.dtype != np.uint8:
            raise ValueError(
                f"actions must be uint8 of shape {self.died.shape}, not {actions.dtype} of shape {actions.shape}"
            )
        _step(self.boards, actions, self.rewards, self.died, self.done, self.episode_length)

    def scores(self) -> np.ndarray:
        """Add up the gains of each team, its length - 9: shape (n, 2)."""
        return self.boards.lengths.reshape(-1, 2, 3).sum(2, dtype=np.int64) - 3 * START_LENGTH

    def bodies(self, b: int) -> list[list[int]]:
        """List the cells of each snake of a board, head first."""
        at = self.boards
        return [[int(segment(at, b, s, i)) for i in range(at.lengths[b, s])] for s in range(SNAKES)]
