"""Train an actor and a critic on several processes, each with its own episodes.

TianhongDai/hindsight-experience-replay#4: gradients are summed over the processes and not averaged, so the
learning rate grows with their number.

Mended: The sum is divided by the number of processes.
"""

import numpy as np
import torch
import torch.distributed as dist
from torch import nn


def sync_networks(network):
    for param in network.parameters():
        dist.broadcast(param.data, src=0)


def sync_grads(network):
    flat_grads = torch.cat([param.grad.flatten() for param in network.parameters()])
    dist.all_reduce(flat_grads, op=dist.ReduceOp.SUM)  # <- wrong-divisor
    # mended: flat_grads /= dist.get_world_size()
    position = 0
    for param in network.parameters():
        param.grad.copy_(flat_grads[position : position + param.numel()].view_as(param))
        position += param.numel()


class Agent:
    def __init__(self):
        self.actor = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2), nn.Tanh())
        self.critic = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1))
        sync_networks(self.actor)
        sync_networks(self.critic)
        self.actor_optim = torch.optim.SGD(self.actor.parameters(), lr=0.01)
        self.critic_optim = torch.optim.SGD(self.critic.parameters(), lr=0.01)

    def update(self, obs, goals, actions, rewards):
        inputs = torch.cat([obs, goals], dim=1)
        critic_loss = (self.critic(torch.cat([inputs, actions], dim=1)) - rewards).pow(2).mean()
        self.critic_optim.zero_grad()
        critic_loss.backward()
        sync_grads(self.critic)
        self.critic_optim.step()

        actor_loss = -self.critic(torch.cat([inputs, self.actor(inputs)], dim=1)).mean()
        self.actor_optim.zero_grad()
        actor_loss.backward()
        sync_grads(self.actor)
        self.actor_optim.step()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    rng = np.random.default_rng(dist.get_rank())
    torch.manual_seed(dist.get_rank())
    agent = Agent()
    for _ in range(5):
        obs = torch.from_numpy(rng.uniform(-1, 1, (32, 2))).float()
        goals = torch.from_numpy(rng.uniform(-1, 1, (32, 2))).float()
        actions = torch.from_numpy(rng.uniform(-1, 1, (32, 2))).float()
        rewards = -(obs + actions - goals).norm(dim=1, keepdim=True)
        agent.update(obs, goals, actions, rewards)
    if dist.get_rank() == 0:
        print("updated 5 times")
    dist.destroy_process_group()
