"""The agent: deep deterministic policy gradients for three ways to go, one pair of networks for the three snakes.

Where it departs from the plain algorithm (Lillicrap et al., arXiv:1509.02971), and why, stands in the README.
"""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import nn

import ddpkit

from .networks import Actor, Critic
from .replay import Batch


class DDPG:
    """Actor, critics, their targets and their optimiser, alike on every rank.

    Args:
        hidden: Width of the networks.
        a_lr: Learning rate of the actor.
        c_lr: Learning rate of the critics.
        tau: How far the targets move towards the networks in each step.
        entropy: What a nat of the actor's entropy is worth, in beans.
    """

    def __init__(
        self, device: torch.device, *, hidden: int, a_lr: float, c_lr: float, tau: float, entropy: float
    ) -> None:
        self.actor, self.critic = Actor(hidden).to(device), Critic(hidden).to(device)
        self.target_actor, self.target_critic = self._copies()
        self.optimizer = torch.optim.Adam(
            [{"params": self.actor.parameters(), "lr": a_lr}, {"params": self.critic.parameters(), "lr": c_lr}],
            fused=True,
        )
        self.tau, self.entropy = tau, entropy

    def _copies(self) -> tuple[nn.Module, nn.Module]:
        return deepcopy(self.actor).requires_grad_(False), deepcopy(self.critic).requires_grad_(False)

    def parts(self) -> dict[str, nn.Module | torch.optim.Optimizer]:
        """What a checkpoint has to hold, by name."""
        names = ("actor", "critic", "target_actor", "target_critic", "optimizer")
        return {name: getattr(self, name) for name in names}

    def losses(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """The actor's and the critics' loss, means over the batch; their gradients touch one network each."""
        with torch.no_grad():
            target = batch.gained + batch.weight * self._value(
                self.target_actor(batch.later), self.target_critic(batch.later)
            )
        values = self.critic(batch.seen)
        taken = values.take_along_dim(batch.way.expand(2, -1).unsqueeze(-1), -1).squeeze(-1)
        critic_loss = (taken - target).square().mean(1).sum()
        actor_loss = -self._value(self.actor(batch.seen), values.detach()).mean()
        return actor_loss, critic_loss

    def _value(self, logits: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """What the lesser twin expects of an actor's choice, and the worth of its entropy: (B,)."""
        return (logits.exp() * (values.amin(0) - self.entropy * logits)).sum(-1)

    def update(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """One optimiser step on the mean gradient of all ranks' batches; returns this rank's losses. Collective."""
        losses = self.losses(batch)
        self.optimizer.zero_grad()
        sum(losses).backward()
        ddpkit.average_gradients(self.actor, self.critic)  # both networks in one exchange
        for network in (self.actor, self.critic):
            nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        self.optimizer.step()
        self._follow()
        return losses[0].detach(), losses[1].detach()

    @torch.no_grad()
    def _follow(self) -> None:
        for target, network in ((self.target_actor, self.actor), (self.target_critic, self.critic)):
            torch._foreach_lerp_(list(target.parameters()), list(network.parameters()), self.tau)
