"""Let a search label the states of games, keep them in files, and hand them out to learn from."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numba import njit
from snakes.features import DIRECTION, FEATURES, PER_WAY, WAYS, observe
from snakes.game import BEAN, CELLS, NONE, SNAKES, STEPS, Boards, Game, segment
from snakes.opponents import Player, ask
from snakes.runs import replacing

from .search import Search
from .student import PLANES, SIDE, look


class States(NamedTuple):
    """Hold boards in little memory, each with what the search finds of one team's ways."""

    bodies: np.ndarray  # (n, CELLS) uint8: the cells of all snakes, one after the other, head first
    lengths: np.ndarray  # (n, 6) uint8
    headings: np.ndarray  # (n, 6) uint8
    beans: np.ndarray  # (n, 5) uint8
    teams: np.ndarray  # (n,) uint8
    ways: np.ndarray  # (n, 3) uint8: those that the search goes
    values: np.ndarray  # (n, 3, WAYS) float32, -inf where a body is in the way


def keep(boards: Boards, team: int, ways: np.ndarray, values: np.ndarray) -> States:
    """Keep boards with the search's ways, (n, 6), and values, (n, 3, WAYS)."""
    bodies = np.zeros((len(boards.times), CELLS), np.uint8)
    _list_bodies(boards, bodies)
    return States(
        bodies,
        boards.lengths.copy(),
        boards.headings.copy(),
        boards.beans.copy(),
        np.full(len(bodies), team, np.uint8),
        ways[:, 3 * team : 3 * team + 3].astype(np.uint8),
        values.astype(np.float32),
    )


@njit(cache=True)
def _list_bodies(boards, bodies):
    for b in range(len(bodies)):
        at = 0
        for s in range(SNAKES):
            for i in range(boards.lengths[b, s]):
                bodies[b, at] = segment(boards, b, s, i)
                at += 1


def restore(states: States) -> Boards:
    """Make the boards of states again, but for their times and random streams."""
    count = len(states.teams)
    boards = Boards(
        cells=np.zeros((count, CELLS), np.uint8),
        bodies=np.zeros((count, SNAKES, 256), np.uint8),
        heads=np.zeros((count, SNAKES), np.uint8),
        lengths=states.lengths,
        headings=states.headings,
        beans=states.beans,
        times=np.zeros(count, np.int32),
        streams=np.zeros(count, np.uint64),
    )
    _fill(boards, states.bodies)
    return boards


@njit(cache=True)
def _fill(boards, bodies):
    for b in range(len(bodies)):
        at = 0
        for s in range(SNAKES):
            for i in range(boards.lengths[b, s]):
                boards.bodies[b, s, i] = bodies[b, at]
                boards.cells[b, bodies[b, at]] += 1
                at += 1
        for bean in boards.beans[b]:
            if bean != NONE:
                boards.cells[b, bean] += BEAN


class Examples(torch.utils.data.Dataset):
    """Hold the states of files as examples: what a team's snakes see, and the probabilities that they shall learn."""

    def __init__(self, files: Sequence[Path], temperature: float) -> None:
        self.states = States(*map(np.concatenate, zip(*map(read, files), strict=True)))
        self.temperature = temperature

    def __len__(self) -> int:
        return len(self.states.teams)

    def __getitems__(self, places: list[int]) -> tuple[torch.Tensor, ...]:
        """Return pictures, numbers and goals of three snakes per state, and the states' places."""
        states = States(*(array[places] for array in self.states))
        boards = restore(states)
        ways = np.tile(states.ways, 2)
        pictures = np.empty((len(places), 3, PLANES, SIDE, SIDE), np.float32)
        numbers = np.empty((len(places), 3, FEATURES), np.float32)
        for team in (0, 1):
            which = np.flatnonzero(states.teams == team)
            boards_of_team = boards.pick(which)
            seen = np.empty((len(which), 3, FEATURES), np.float32)
            observe(boards_of_team, team, seen)
            numbers[which] = seen
            for k in range(3):
                pictures[which, k] = look(boards_of_team, 3 * team + k, ways[which])
        goals = torch.from_numpy(states.values / self.temperature).softmax(-1)
        parts = torch.from_numpy(pictures), torch.from_numpy(numbers), goals
        return *(part.flatten(0, 1) for part in parts), torch.tensor(places).repeat_interleave(3)


def play(numbers: range, seed: int, mover: Player, teacher: Search, rivals: Sequence[Player]) -> Iterator[States]:
    """Play games, and yield the states of each step, labelled.

    A game depends on the seed and its number alone: on its side and its rival, and on whether the mover moves, or the
    search does.
    """
    game = Game(len(numbers), seed, first=numbers.start)
    kinds = np.array(numbers)
    sides, moves, rival = kinds % 2, kinds // 2 % 2 == 0, kinds // 4 % len(rivals)
    actions = np.zeros((len(numbers), SNAKES), np.uint8)
    for _ in range(STEPS):
        found = []
        for team in (0, 1):
            which = np.flatnonzero(sides == team)
            boards = game.boards.pick(which)
            ways, values = teacher.plan(boards, team)
            found.append(keep(boards, team, ways, values))
            own = slice(3 * team, 3 * team + 3)
            actions[which, own] = DIRECTION[boards.headings[:, own], ways[:, own]]
            ask(mover, game.boards, team, np.flatnonzero((sides == team) & moves), actions)
            for number, player in enumerate(rivals):
                ask(player, game.boards, 1 - team, np.flatnonzero((sides == team) & (rival == number)), actions)
        yield States(*(np.concatenate(parts) for parts in zip(*found, strict=True)))
        game.step(actions)
        game.reset(game.done)


def write(path: Path, steps: Sequence[States]) -> None:
    """Write states to a file, whole or not at all."""
    arrays = States(*(np.concatenate(parts) for parts in zip(*steps, strict=True)))
    with replacing(path) as whole, whole.open("wb") as file:  # to a name savez would add .npz
        np.savez_compressed(file, **arrays._asdict())


def read(path: Path) -> States:
    """Read the states of a file."""
    with np.load(path) as arrays:
        return States(**arrays)


def mirror(batch: Sequence[torch.Tensor], epoch: int) -> list[torch.Tensor]:
    """Mirror half of a batch, left to right: each state in every second epoch. Return pictures, numbers and goals."""
    pictures, numbers, goals, places = batch
    which = (places + epoch) % 2 == 1
    pictures[which] = pictures[which].flip(-1)
    ways = numbers[:, : WAYS * PER_WAY].unflatten(1, (WAYS, PER_WAY))
    ways[which] = ways[which].flip(1)
    goals[which] = goals[which].flip(1)
    return [pictures, numbers, goals]
