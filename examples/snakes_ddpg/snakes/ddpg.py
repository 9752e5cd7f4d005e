"""The agent: deep deterministic policy gradients for three ways to go, one pair of networks for the three snakes.

Where it departs from the plain algorithm (Lillicrap et al., arXiv:1509.02971), and why, stands in the README.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from pathlib import Path

import torch
from torch import nn

import ddpkit

from .networks import Actor, Critic, load_weights
from .replay import Batch


class DDPG:
    """Actor, critic, their targets and their optimiser, alike on every rank.

    Args:
        hidden: Width of the networks.
        a_lr: Learning rate of the actor.
        c_lr: Learning rate of the critic.
        tau: How far the targets move towards the networks in each step.
    """

    def __init__(self, device: torch.device, *, hidden: int, a_lr: float, c_lr: float, tau: float) -> None:
        self.actor, self.critic = Actor(hidden).to(device), Critic(hidden).to(device)
        self.networks = nn.ModuleList([self.actor, self.critic])
        self.targets = deepcopy(self.networks).requires_grad_(False)  # not wrapped, nor averaged: they follow alike
        self.optimizer = torch.optim.Adam(
            [{"params": self.actor.parameters(), "lr": a_lr}, {"params": self.critic.parameters(), "lr": c_lr}],
            fused=True,
        )
        self.tau = tau

    def losses(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """The actor's and the critic's loss, means over the batch; their gradients touch one network each."""
        actor, critic = self.targets
        with torch.no_grad():
            target = batch.reward + batch.weight * (actor(batch.later) * critic(batch.later)).sum(-1)
        values = self.critic(batch.seen)
        taken = values.gather(1, batch.way.unsqueeze(1)).squeeze(1)
        actor_loss = -(self.actor(batch.seen) * values.detach()).sum(-1).mean()
        return actor_loss, nn.functional.mse_loss(taken, target)

    @contextmanager
    def update(
        self, batch: Batch, averaging: Callable[..., AbstractContextManager[None]] = ddpkit.averaging
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """One optimiser step on the mean gradient of all ranks' batches, taken when the block is left. Collective.

        The block runs while the gradients travel: it may play on, with the weights before the step.

        Yields:
            This rank's losses of actor and critic.
        """
        losses = self.losses(batch)
        self.optimizer.zero_grad()
        sum(losses).backward()
        with averaging(self.networks):  # both in one exchange
            yield losses[0].detach(), losses[1].detach()
        for network in self.networks:
            nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        self.optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(list(self.targets.parameters()), list(self.networks.parameters()), self.tau)

    def load(self, actor: Path, critic: Path) -> None:
        """Begins with the weights of two files `actor_*.pth` and `critic_*.pth`, the targets too.

        Raises:
            ValueError: If they do not fit.
        """
        for network, path in zip(self.networks, (actor, critic), strict=True):
            load_weights(network, path)
        self.targets.load_state_dict(self.networks.state_dict())
