"""Define the networks, and train them: one actor and one critic for the three snakes, and their update.

The replay, the target networks and an actor that climbs what the critic says are those of DDPG (Lillicrap et al.,
arXiv:1509.02971). But an action is one of three ways to go, and the critic takes none: it gives each way its value. So
its target is that of expected SARSA, and the actor's gradient the sum over all actions of Mean Actor-Critic (Allen et
al., arXiv:1709.00503).
"""

import re
import textwrap
from contextlib import ExitStack
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import ddpkit

from .collector import Batch
from .features import DIRECTION, FEATURES, WAYS, see
from .game import SNAKES, Boards


class Perceptron(nn.Sequential):
    """Map FEATURES -> hidden -> hidden -> WAYS, with ReLU between.

    With `bfloat16` set, the second layer computes in it, from float32 weights, in a third of the time on a CPU that has
    it. In bfloat16 the first layer would make weaker players, and to the last one two ways may be almost as good.
    """

    def __init__(self, hidden: int) -> None:
        super().__init__(
            nn.Linear(FEATURES, hidden),
            nn.ReLU(inplace=True),
            nn.Linear(hidden, hidden),
            nn.ReLU(inplace=True),
            nn.Linear(hidden, WAYS),
        )
        self.bfloat16 = False

    def forward(self, seen: torch.Tensor) -> torch.Tensor:
        if not self.bfloat16:
            return super().forward(seen)
        first, activation, second, _, last = self
        hidden = activation(first(seen).bfloat16())  # in half the memory, and to the bits the same, as in float32
        with torch.autocast(hidden.device.type, torch.bfloat16):
            hidden = activation(second(hidden))
        return last(hidden.float())


def computes_in_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Return whether this CPU multiplies matrices in bfloat16; without that it is slower than float32."""
    try:
        return re.search(r"\b(avx512|amx)_bf16\b", cpuinfo.read_text()) is not None
    except OSError:
        return False


def uses_bfloat16(precision: str, device: torch.device) -> bool:
    """Return whether to compute in bfloat16 by a flag `--precision`, on a device."""
    if precision == "auto":
        return device.type == "cpu" and computes_in_bfloat16()
    return precision == "bfloat16"


class Actor(nn.Module):
    """Map what snakes see, float32 of shape (..., FEATURES), to the ways' probabilities, (..., WAYS)."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.layers = Perceptron(hidden)

    def forward(self, seen: torch.Tensor) -> torch.Tensor:
        scores = self.layers(seen).movedim(-1, 0).contiguous()  # torch's softmax is seven times as quick like that
        return scores.softmax(0).movedim(0, -1).contiguous()


class Critic(nn.Module):
    """Map what snakes see, float32 of shape (..., FEATURES), to the ways' values, (..., WAYS)."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.values = Perceptron(hidden)  # not `layers`: nobody shall take a critic for an actor

    def forward(self, seen: torch.Tensor) -> torch.Tensor:
        return self.values(seen)


class Policy:
    """Play as one team, by each snake's most probable way: a player like those in `opponents.py`."""

    def __init__(self, actor: Actor) -> None:
        self.actor = actor

    def __call__(self, boards: Boards, team: int, actions: np.ndarray) -> None:
        ways, _ = self.plan(boards, team)
        snakes = slice(3 * team, 3 * team + 3)
        actions[:, snakes] = DIRECTION[boards.headings[:, snakes], ways[:, snakes]]

    @torch.no_grad()
    def plan(self, boards: Boards, team: int) -> tuple[np.ndarray, np.ndarray]:
        """Choose a team's ways, in its columns of (n, 6); return them, and how all are rated, (n, 3, WAYS)."""
        ratings = self.actor.layers(self.look(boards, team)).numpy(force=True)
        ways = np.zeros((len(ratings), SNAKES), np.uint8)
        ways[:, 3 * team : 3 * team + 3] = ratings.argmax(-1)
        return ways, ratings

    def look(self, boards: Boards, *teams: int) -> torch.Tensor:
        """See what the actor takes: (n, 3 per team, FEATURES), on its device."""
        return torch.from_numpy(see(boards, *teams)).to(next(self.actor.parameters()).device)


def read_weights(path: Path) -> dict[str, Any]:
    """Read a state dict; raise a FileNotFoundError if there is no such file, a ValueError if it is of another kind."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}: a run keeps its models in its folder trained_model")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        if not (isinstance(state, dict) and all(isinstance(name, str) for name in state)):
            raise TypeError("it holds no weights by name")
        return state
    except Exception as error:  # whose message advises to run what the file holds
        raise ValueError(
            f"{path} is no file of weights that torch.save() wrote: name an actor_*.pth of a run's folder trained_model"
        ) from error


def load_network(kind: type[nn.Module], path: Path, hidden: int | None = None) -> nn.Module:
    """Load an Actor or a Critic from a file that holds its state dict, of whatever width if none is given.

    Raise as `read_weights()`, and a ValueError if the file holds anything else, or other shapes.
    """
    state = read_weights(path)
    try:
        network = kind(hidden or len(next(iter(state.values()))))
        network.load_state_dict(state)
        return network
    except Exception as error:  # not of weights, or of other shapes
        what = {Actor: "an actor", Critic: "a critic"}.get(kind, "distilled networks")
        first = textwrap.shorten(str(error).partition(". ")[0].rstrip("."), 200)  # the rest is advice of torch
        raise ValueError(
            f"{path} does not hold {what} from {FEATURES} features to {WAYS} ways ({type(error).__name__}: {first}). "
            "Make it anew: a model is good only for the features and the --hidden that it was made with"
        ) from error


class DDPG:
    """Hold actor, critic, their targets and their optimiser, alike on every rank; arguments as the trainer's flags."""

    def __init__(
        self,
        device: torch.device,
        *,
        hidden: int,
        a_lr: float,
        c_lr: float,
        gamma: float,
        tau: float,
        bfloat16: bool = False,
    ) -> None:
        self.hidden = hidden
        self.actor = Actor(hidden)
        self.critic = Critic(hidden)
        self.actor.layers.bfloat16 = self.critic.values.bfloat16 = bfloat16
        self.networks = nn.ModuleList([self.actor, self.critic]).to(device)
        self.targets = deepcopy(self.networks).requires_grad_(False)  # not averaged: they follow alike
        groups = [{"params": self.actor.parameters(), "lr": a_lr}, {"params": self.critic.parameters(), "lr": c_lr}]
        self.optimizer = torch.optim.Adam(groups, fused=True)
        self.parts = {"networks": self.networks, "targets": self.targets, "optimizer": self.optimizer}  # to be saved
        self.gamma = gamma
        self.tau = tau
        self._update = ExitStack()  # what is left to do of the update that was started

    def losses(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the actor's and the critic's loss, means over the batch, each with its own network's gradients."""
        target_actor, target_critic = self.targets
        with torch.no_grad():
            later = target_actor(batch.later) * target_critic(batch.later)
            target = batch.reward + self.gamma * later.sum(-1)
        values = self.critic(batch.seen)
        taken = values.gather(1, batch.way.unsqueeze(1)).squeeze(1)
        critic_loss = nn.functional.mse_loss(taken, target)

        probabilities = self.actor(batch.seen)
        actor_loss = -(probabilities * values.detach()).sum(-1).mean()
        return actor_loss, critic_loss

    def start_update(self, batch: Batch) -> torch.Tensor:
        """Start an optimiser step: compute the gradients, and send them to the other ranks. Collective.

        Take as many rows on every rank; return this rank's losses of actor and critic, of shape (2,). Until
        `finish_update()` the weights are those before the step, and may be used to play on.
        """
        actor_loss, critic_loss = self.losses(batch)
        self.optimizer.zero_grad()
        (actor_loss + critic_loss).backward()
        self._update.callback(self._step)
        self._update.enter_context(ddpkit.averaging(self.networks))  # which ends before the step
        return torch.stack([actor_loss.detach(), critic_loss.detach()])

    def finish_update(self) -> None:
        """Finish the step that was started, if any, by the mean gradients of all ranks. Collective."""
        self._update.close()

    def _step(self) -> None:
        self.optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(list(self.targets.parameters()), list(self.networks.parameters()), self.tau)

    def states(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the weights of actor and critic, to be saved."""
        return self.actor.state_dict(), self.critic.state_dict()

    def load(self, actor: Path, critic: Path) -> None:
        """Begin with the weights of two files, the targets too; raise a ValueError if they do not fit."""
        self.actor.load_state_dict(load_network(Actor, actor, self.hidden).state_dict())
        self.critic.load_state_dict(load_network(Critic, critic, self.hidden).state_dict())
        self.targets.load_state_dict(self.networks.state_dict())
