"""Train the agent: one actor and one critic for the three snakes, and their update.

It comes from DDPG (Lillicrap et al., arXiv:1509.02971), of which are the replay, the target
networks and an actor that climbs what the critic says. But an action is one of three ways to go,
and the critic takes none: it gives each way its value. So the critic's target is that of expected
SARSA, and the actor's gradient the sum over all actions of Mean Actor-Critic (Allen et al.,
arXiv:1709.00503). The README lists all departures, and why.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from copy import deepcopy
from pathlib import Path

import torch
from torch import nn

import ddpkit

from .networks import Actor, Critic, load_weights
from .replay import Batch


class DDPG:
    """Hold actor, critic, their targets and their optimiser, alike on every rank.

    Args:
        device: Where they are.
        hidden: Width of the networks.
        a_lr: Learning rate of the actor.
        c_lr: Learning rate of the critic.
        tau: Part of the way to the networks that the targets go in each step.
        bfloat16: Compute the second layer of each network in bfloat16.
    """

    def __init__(
        self, device: torch.device, *, hidden: int, a_lr: float, c_lr: float, tau: float, bfloat16: bool = False
    ) -> None:
        self.actor = Actor(hidden).to(device)
        self.critic = Critic(hidden).to(device)
        self.actor.layers.bfloat16 = bfloat16
        self.critic.values.bfloat16 = bfloat16
        self.networks = nn.ModuleList([self.actor, self.critic])
        self.targets = deepcopy(self.networks).requires_grad_(False)  # not averaged: they follow alike
        actor = {"params": self.actor.parameters(), "lr": a_lr}
        critic = {"params": self.critic.parameters(), "lr": c_lr}
        self.optimizer = torch.optim.Adam([actor, critic], fused=True)
        self.tau = tau
        self.exchange = Exchange(self.networks)

    def losses(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the actor's and the critic's loss, means over the batch.

        The gradients of each are those of its own network alone.
        """
        target_actor, target_critic = self.targets
        with torch.no_grad():
            later = target_actor(batch.later) * target_critic(batch.later)
            target = batch.reward + batch.weight * later.sum(-1)
        values = self.critic(batch.seen)
        taken = values.gather(1, batch.way.unsqueeze(1)).squeeze(1)
        critic_loss = nn.functional.mse_loss(taken, target)

        probabilities = self.actor(batch.seen)
        actor_loss = -(probabilities * values.detach()).sum(-1).mean()
        return actor_loss, critic_loss

    def start_update(self, batch: Batch) -> torch.Tensor:
        """Start an optimiser step: compute the gradients, and send them to the other ranks. Collective.

        Until `finish_update()` the weights are those before the step, and may be used to play on.

        Args:
            batch: This rank's rows, as many on every rank.

        Returns:
            This rank's losses of actor and critic, of shape (2,).
        """
        actor_loss, critic_loss = self.losses(batch)
        self.optimizer.zero_grad()
        (actor_loss + critic_loss).backward()
        self.exchange.start()
        return torch.stack([actor_loss.detach(), critic_loss.detach()])

    def finish_update(self) -> None:
        """Finish the step that was started, if any, by the mean gradients of all ranks. Collective."""
        if not self.exchange.under_way:
            return
        self.exchange.finish()
        for network in self.networks:
            nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        self.optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(list(self.targets.parameters()), list(self.networks.parameters()), self.tau)

    def set_rates(self, a_lr: float, c_lr: float) -> None:
        """Set the learning rates of the next steps."""
        actor, critic = self.optimizer.param_groups
        actor["lr"] = a_lr
        critic["lr"] = c_lr

    def load(self, actor: Path, critic: Path) -> None:
        """Load the weights of two files `actor_*.pth` and `critic_*.pth`, into the targets too.

        Raises:
            ValueError: If they do not fit.
        """
        load_weights(self.actor, actor)
        load_weights(self.critic, critic)
        self.targets.load_state_dict(self.networks.state_dict())


class Exchange:
    """Average the gradients of networks over all ranks, while the program does other work.

    `ddpkit.averaging()` does that for a block; here the block's begin and end are two calls.
    """

    def __init__(self, networks: nn.Module) -> None:
        self.networks = networks
        self.under_way = False
        self.seconds = 0.0  # spent in both calls so far, most of it waiting for other ranks
        self._averaging = ExitStack()

    def start(self) -> None:
        """Send this rank's gradients; from now on the parameters have none. Collective."""
        start = time.perf_counter()
        self._averaging.enter_context(ddpkit.averaging(self.networks))
        self.under_way = True
        self.seconds += time.perf_counter() - start

    def finish(self) -> None:
        """Wait for the means of all ranks, and give them to the parameters. Collective."""
        start = time.perf_counter()
        self.under_way = False
        self._averaging.close()
        self.seconds += time.perf_counter() - start
