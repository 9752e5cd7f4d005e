"""Let a search label the states of games, keep them in files, and hand them out to learn from."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numba import njit
from snakes.features import DIRECTION, FEATURES, PER_WAY, WAYS, see
from snakes.game import BEAN, CELLS, NONE, SNAKES, STEPS, Boards, Game, foresee, segment
from snakes.opponents import Player, ask
from snakes.runs import replacing

from .search import GAMMA, Search
from .student import PLANES, SIDE, look

LAMBDA = 0.9  # weight of what follows a step, against what the search expected of it


class States(NamedTuple):
    """Hold boards in little memory, each with what the search finds of one team's ways, and what comes of a step."""

    bodies: np.ndarray  # (n, CELLS) uint8: the cells of all snakes, one after the other, head first
    lengths: np.ndarray  # (n, 6) uint8
    headings: np.ndarray  # (n, 6) uint8
    beans: np.ndarray  # (n, 5) uint8
    teams: np.ndarray  # (n,) uint8
    ways: np.ndarray  # (n, 3) uint8: those that the search goes
    values: np.ndarray  # (n, 3, WAYS) float32, -inf where a body is in the way
    actions: np.ndarray  # (n, 6) uint8: the directions that all snakes take
    gains: np.ndarray  # (n,) float32: what the team gains on the other in this step; in a file in all later ones


def keep(
    boards: Boards, team: int, ways: np.ndarray, values: np.ndarray, actions: np.ndarray, rewards: np.ndarray
) -> States:
    """Keep boards with the search's ways, (n, 6), and values, (n, 3, WAYS), the actions, (n, 6), and their rewards."""
    bodies = np.zeros((len(boards.times), CELLS), np.uint8)
    _list_bodies(boards, bodies)
    gains = rewards.reshape(-1, 2, 3).sum(2).astype(np.float32)
    return States(
        bodies,
        boards.lengths.copy(),
        boards.headings.copy(),
        boards.beans.copy(),
        np.full(len(bodies), team, np.uint8),
        ways[:, 3 * team : 3 * team + 3].astype(np.uint8),
        values.astype(np.float32),
        actions,
        gains[:, team] - gains[:, 1 - team],
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


class Batch(NamedTuple):
    """Hold what is learnt from B states, in each of which a team has three snakes and three rivals."""

    pictures: torch.Tensor  # (B, 3, PLANES, SIDE, SIDE): what the team's snakes see
    numbers: torch.Tensor  # (B, 3, FEATURES)
    goals: torch.Tensor  # (B, 3, WAYS): how probable their ways shall be
    rivals: torch.Tensor  # (B, 3, FEATURES): what the rivals see
    taken: torch.Tensor  # (B, 3): the ways that they take
    later: torch.Tensor  # (B, 6, FEATURES): what all see after the step, but of no new beans; the team is first
    gains: torch.Tensor  # (B,): what the team gains on the other after the step, discounted
    places: torch.Tensor  # (B,): of the states, among all


class Examples(torch.utils.data.Dataset):
    """Hold the states of files as examples to learn from."""

    def __init__(self, files: Sequence[Path], temperature: float) -> None:
        self.states = States(*map(np.concatenate, zip(*map(read, files), strict=True)))
        self.temperature = temperature

    def __len__(self) -> int:
        return len(self.states.teams)

    def __getitems__(self, places: list[int]) -> Batch:
        states = States(*(array[places] for array in self.states))
        boards = restore(states)
        ways = np.tile(states.ways, 2)
        count = len(places)
        pictures = np.empty((count, 3, PLANES, SIDE, SIDE), np.float32)
        seen, later = np.empty((2, count, SNAKES, FEATURES), np.float32)
        taken = np.empty((count, 3), np.int64)
        for team in (0, 1):
            which = np.flatnonzero(states.teams == team)
            part = boards.pick(which)
            for k in range(3):
                pictures[which, k] = look(part, 3 * team + k, ways[which])
            seen[which] = see(part, team, 1 - team)
            rivals = slice(3 - 3 * team, 6 - 3 * team)
            directions = states.actions[which, rivals]
            taken[which] = (DIRECTION[part.headings[:, rivals]] == directions[..., None]).argmax(-1)
            rewards, died = np.empty((len(which), SNAKES), np.int16), np.empty((len(which), SNAKES), np.bool_)
            foresee(part, states.actions[which], rewards, died)
            later[which] = see(part, team, 1 - team)
        goals = torch.from_numpy(states.values / self.temperature).softmax(-1)
        own, others = torch.from_numpy(seen).split(3, dim=1)
        return Batch(
            pictures=torch.from_numpy(pictures),
            numbers=own,
            goals=goals,
            rivals=others,
            taken=torch.from_numpy(taken),
            later=torch.from_numpy(later),
            gains=torch.from_numpy(states.gains),
            places=torch.tensor(places),
        )


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
        plans = []
        for team in (0, 1):
            which = np.flatnonzero(sides == team)
            boards = game.boards.pick(which)
            ways, values = teacher.plan(boards, team)
            plans.append((which, boards, ways, values))
            own = slice(3 * team, 3 * team + 3)
            actions[which, own] = DIRECTION[boards.headings[:, own], ways[:, own]]
            ask(mover, game.boards, team, np.flatnonzero((sides == team) & moves), actions)
            for number, player in enumerate(rivals):
                ask(player, game.boards, 1 - team, np.flatnonzero((sides == team) & (rival == number)), actions)
        game.step(actions)
        found = [
            keep(boards, team, ways, values, actions[which], game.rewards[which])
            for team, (which, boards, ways, values) in enumerate(plans)
        ]
        yield States(*(np.concatenate(parts) for parts in zip(*found, strict=True)))
        game.reset(game.done)


def write(path: Path, steps: Sequence[States]) -> None:
    """Write the states of games, step by step but for the last, to a file, whole or not at all.

    What a team gains after a step is what the search expected then, and what came of it, as in TD(lambda).
    """
    expected = [state.values[:, 2].max(1) for state in steps]  # by the last of the team's snakes to choose
    gains = [expected[-1]]
    for state, value in zip(steps[-2:0:-1], expected[-2:0:-1], strict=True):
        gains.append((1 - LAMBDA) * value + LAMBDA * (state.gains + GAMMA * gains[-1]))
    labelled = [state._replace(gains=gain) for state, gain in zip(steps[:-1], gains[::-1], strict=True)]
    arrays = States(*(np.concatenate(parts) for parts in zip(*labelled, strict=True)))
    with replacing(path) as whole, whole.open("wb") as file:  # to a name savez would add .npz
        np.savez_compressed(file, **arrays._asdict())


def read(path: Path) -> States:
    """Read the states of a file."""
    with np.load(path) as arrays:
        return States(**arrays)


def mirror(batch: Batch, epoch: int) -> Batch:
    """Mirror half of a batch in place, left to right: each state in every second epoch."""
    which = (batch.places + epoch) % 2 == 1
    batch.pictures[which] = batch.pictures[which].flip(-1)
    batch.goals[which] = batch.goals[which].flip(-1)
    batch.taken[which] = WAYS - 1 - batch.taken[which]
    for numbers in (batch.numbers, batch.rivals, batch.later):
        ways = numbers[..., : WAYS * PER_WAY].unflatten(-1, (WAYS, PER_WAY))
        ways[which] = ways[which].flip(-2)
    return batch
