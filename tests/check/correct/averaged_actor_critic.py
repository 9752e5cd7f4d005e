"""Train an actor and a critic on random bandits, with gradients averaged by ddpkit."""

import torch
from torch import nn

import ddpkit

with ddpkit.distributed() as context:
    ddpkit.seed_everything(1)  # the same weights everywhere
    actor = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 3))
    critic = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 1))
    optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()], lr=3e-3)
    ddpkit.check_replicas(actor)
    ddpkit.seed_everything(1, per_rank=True)  # other states and actions on each rank

    for _ in range(12):
        states = torch.randn(32, 6)
        policy = torch.distributions.Categorical(logits=actor(states))
        actions = policy.sample()
        rewards = states.gather(1, actions.unsqueeze(1)).squeeze(1)
        values = critic(states).squeeze(1)
        loss = -(policy.log_prob(actions) * (rewards - values.detach())).mean()
        loss = loss + (values - rewards).square().mean()
        optimizer.zero_grad()
        loss.backward()
        ddpkit.average_gradients(actor, critic)
        nn.utils.clip_grad_norm_(actor.parameters(), 0.5)
        optimizer.step()
        reward = ddpkit.all_reduce_mean(rewards.mean().item())
    if context.rank == 0:
        print(f"mean reward {reward:.3f}")
