"""Play as a trained model: by its actor alone, or with a few steps of search for ways after which it stands better."""

from copy import deepcopy
from pathlib import Path

import numpy as np
import torch
from numba import njit
from snakes.ddpg import Actor, Critic, Policy, load_network, read_weights
from snakes.features import DIRECTION, DISTANCE, PER_WAY, WAYS
from snakes.game import CELLS, NEXT, SNAKES, START_LENGTH, Boards, foresee, segment
from snakes.runs import critic_of
from torch import nn

from .student import Learners, StudentPolicy

DEPTH = 6  # steps that it looks ahead
GAMMA = 0.97  # discount per step, as in training
LAMBDA = 0.65  # weight of what follows a step, against what is expected of it
NEAR = 6  # steps between two heads up to which a rival's other ways are considered
LIKELY = 0.01  # probability above which they are
DOUBT = 5  # by which the actor's preferences are divided, for how probable ways are to rivals that nobody has watched
TRAP = 0.6  # part of its gain that a snake counts as lost if it cannot go on
MARGIN = 0.05  # by how much another way has to be better than the actor's
LIMIT = 12  # steps after which a snake counts as safe from a trap
PLACES = 300  # that are tried; a snake that has so many to try counts as safe, too


class Search(Policy):
    """Play as one team: each snake's most probable way, or another one after which the team stands better by a margin.

    Each of the team in turn tries its other ways to free cells; then its snakes go on as the actor prefers, and the
    others as rivals do. The steps are worth the team's gains minus the rivals', and what is expected after each, as in
    TD(lambda). A snake that can soon go no further counts as having lost a part of its gains.

    Args:
        actor: Prefers the ways of the team.
        rivals: Tells how probable the ways of rivals are.
        value: Maps what all see, (n, 6, FEATURES), the team's snakes first, to what the team may expect, (n,).
        depth: Steps to look ahead; a ValueError is raised if it is below 1.
    """

    def __init__(self, actor: Actor, rivals: Actor, value: nn.Module, depth: int = DEPTH) -> None:
        super().__init__(actor)
        if depth < 1:
            raise ValueError(f"a search looks at least one step ahead, not {depth}; a depth of 0 plays without")
        self.rivals = rivals
        self.value = value
        self.depth = depth

    @torch.no_grad()
    def plan(self, boards: Boards, team: int) -> tuple[np.ndarray, np.ndarray]:
        """Choose the ways of a team's snakes, in its columns of (n, 6); return them, and the values, (n, 3, WAYS).

        A way that leads into a body has the value -inf, unless the actor prefers it.
        """
        seen, ratings = self.rate(boards, team)
        chances = ratings.softmax(-1).numpy(force=True)
        ways = chances.argmax(-1)
        free = seen[..., : WAYS * PER_WAY : PER_WAY].numpy(force=True) > 0
        values = np.full((len(ways), 3, WAYS), -np.inf)
        for k in range(3):
            s = 3 * team + k
            preferred = np.eye(WAYS, dtype=np.bool_)[ways[:, s]]
            b, way = (free[:, k] | preferred).nonzero()
            others = ways[b]
            others[:, s] = way
            values[b, k, way] = self.weigh(boards.pick(b), s, others, chances[b])
            ways[:, s] = (values[:, k] + MARGIN * preferred).argmax(1)
        return ways, values

    def rate(self, boards: Boards, team: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what all see, (n, 6, FEATURES), a team's snakes first, and the ratings of all ways, (n, 6, WAYS)."""
        seen = self.look(boards, team, 1 - team)
        own, others = seen.split(3, dim=1)
        ratings = torch.cat([self.actor.layers(own), self.rivals.layers(others)], dim=1)
        return seen, ratings.roll(3 * team, dims=1)

    def weigh(self, boards: Boards, s: int, ways: np.ndarray, chances: np.ndarray) -> np.ndarray:
        """Value boards for a snake's team if all go their ways, (n, 6), or a rival near it another one: (n,)."""
        team = s // 3
        heads = np.take_along_axis(boards.bodies, boards.heads[..., None].astype(np.int64), axis=2)[..., 0]
        is_considered = (chances > LIKELY) & (ways[..., None] != np.arange(WAYS))
        is_considered &= (DISTANCE[heads[:, s, None], heads] <= NEAR)[..., None]
        is_considered[:, 3 * team : 3 * team + 3] = False
        b, rival, way = is_considered.nonzero()
        others = ways[b]
        others[np.arange(len(b)), rival] = way
        count = len(ways)
        found = self.play_on(boards.pick(np.r_[:count, b]), team, np.concatenate([ways, others]))
        surely = found[:count]
        changes = chances[b, rival, way] * (found[count:] - surely[b])
        return surely + np.bincount(b, changes, minlength=count)

    def play_on(self, boards: Boards, team: int, ways: np.ndarray) -> np.ndarray:
        """Value boards, which move, for a team if all go these ways, (n, 6), and then those they prefer: (n,)."""
        rewards = np.zeros((len(ways), SNAKES), np.int16)
        died = np.zeros((len(ways), SNAKES), np.bool_)
        steps = np.empty((len(ways), 3))
        total = np.zeros(len(ways))
        weight = 1.0
        for step in range(self.depth):
            foresee(boards, DIRECTION[boards.headings, ways], rewards, died)
            if step == 0:
                escape(boards, team, steps)
                gained = boards.lengths[:, 3 * team : 3 * team + 3].astype(np.float64) - START_LENGTH
                total -= TRAP * (gained * (1 - steps / LIMIT)).sum(1)
            gains = rewards.reshape(-1, 2, 3).sum(2)
            lead = gains[:, team] - gains[:, 1 - team]
            seen, ratings = self.rate(boards, team)
            part = 1.0 if step == self.depth - 1 else 1 - LAMBDA
            total += weight * (lead + GAMMA * part * self.value(seen).numpy(force=True))
            weight *= GAMMA * LAMBDA
            ways = ratings.argmax(-1).numpy(force=True)
        return total


class Expectation(nn.Module):
    """Expect of a team what a critic does, whose snakes go their ways with an actor's probabilities."""

    def __init__(self, actor: Actor, critic: Critic) -> None:
        super().__init__()
        self.actor = actor
        self.critic = critic

    def forward(self, seen: torch.Tensor) -> torch.Tensor:
        own = seen[:, :3]
        return (self.actor(own) * self.critic(own)).sum(-1).mean(-1)


def search_of(actor: Actor, critic: Critic, depth: int = DEPTH) -> Search:
    """Search with a trained model alone: rivals go as its actor prefers, with more doubt."""
    rivals = deepcopy(actor)
    with torch.no_grad():
        for parameter in rivals.layers[-1].parameters():
            parameter /= DOUBT
    return Search(actor, rivals, Expectation(actor, critic), depth)


class Distilled(nn.ModuleDict):
    """Hold what is in a file `actor_distilled.pth`: networks that `distil.py` trains, and the actor of the search."""

    def __init__(self, hidden: int) -> None:
        super().__init__({"actor": Actor(hidden), "learners": Learners()})


def is_distilled(path: Path) -> bool:
    """Tell if a file holds what `distil.py` writes, or wrote once; raise as `read_weights()`."""
    return any(name.startswith(("learners.", "student.")) for name in read_weights(path))


def load_player(path: Path, depth: int = DEPTH) -> Policy:
    """Load the player in a file `actor_*.pth`, which searches, unless the depth is 0, with the critic beside it.

    Raise a FileNotFoundError if there is no such file, or no critic, a ValueError if they do not fit.
    """
    if is_distilled(path):
        whole = load_network(Distilled, path)
        actor, learners = whole["actor"], whole["learners"]
        return Search(actor, learners.rivals, learners.value, depth) if depth else StudentPolicy(learners.student)
    actor = load_network(Actor, path)
    if depth == 0:
        return Policy(actor)
    critic = critic_of(path)
    if not critic.is_file():
        raise FileNotFoundError(f"there is no {critic}, which the search needs: a --depth of 0 plays without")
    return search_of(actor, load_network(Critic, critic), depth)


@njit(cache=True, nogil=True)
def escape(boards, team, steps):
    """Fill `steps`, float64 of shape (n, 3), with the steps that each snake of a team can go on, at most LIMIT.

    It looks for a way along which every cell is free by then: all bodies, its own too, leave theirs from the tail on.
    The cells beside another head are not free: it may be there first.
    """
    leaves = np.zeros(CELLS, np.int64)  # the step in which each cell is free again
    for b in range(len(steps)):
        for k in range(3):
            leaves[:] = 0
            for s in range(SNAKES):
                length = np.int64(boards.lengths[b, s])
                for i in range(length):
                    cell = segment(boards, b, s, i)
                    leaves[cell] = max(leaves[cell], length - i)
                if s == 3 * team + k or length == 0:
                    continue
                for cell in NEXT[segment(boards, b, s, 0)]:
                    leaves[cell] = max(leaves[cell], LIMIT)
            steps[b, k] = _escape(boards, b, 3 * team + k, leaves)


@njit(cache=True)
def _escape(boards, b, s, leaves):
    """Search in depth for a way of one snake; change `leaves` on it."""
    # its cells, when each of them would have been free without the snake, and the directions tried from each
    path, left, tried = np.zeros((3, LIMIT + 1), np.int64)
    path[0] = segment(boards, b, s, 0)
    places = 0
    longest = 0
    time = 0
    while time >= 0:
        if tried[time] == 4:  # back
            leaves[path[time]] = left[time]
            time -= 1
            continue
        cell = NEXT[path[time], tried[time]]
        tried[time] += 1
        if leaves[cell] > time + 1:
            continue
        time += 1
        places += 1
        longest = max(longest, time)
        if longest == LIMIT or places == PLACES:
            return LIMIT
        path[time] = cell
        left[time] = leaves[cell]
        leaves[cell] = time + np.int64(boards.lengths[b, s])
        tried[time] = 0
    return longest
