"""Train an advantage actor-critic on several processes: one flat all-reduce of the gradients of each update."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributions import Normal


class PointMasses:
    """Push points to the origin, many at a time."""

    def __init__(self, num_envs, seed):
        self.generator = torch.Generator().manual_seed(seed)
        self.num_envs = num_envs
        self.state = torch.randn(num_envs, 4, generator=self.generator)

    def step(self, force):
        position, velocity = self.state.chunk(2, dim=1)
        velocity = 0.9 * velocity + 0.1 * force
        self.state = torch.cat([position + 0.1 * velocity, velocity], dim=1)
        return self.state, -self.state.square().sum(1)


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))
        self.critic = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))
        self.log_std = nn.Parameter(torch.zeros(2))


def all_reduce_gradients(model):
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([grad.view(-1) for grad in grads])
    dist.all_reduce(flat, op=dist.ReduceOp.SUM)
    flat /= dist.get_world_size()
    for grad, part in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(part.view_as(grad))


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    agent = Agent()
    for tensor in agent.state_dict().values():
        dist.broadcast(tensor, src=0)
    optimizer = torch.optim.Adam(agent.parameters(), lr=3e-3)
    torch.manual_seed(10_000 + rank)
    env = PointMasses(num_envs=16, seed=rank)
    for update in range(6):
        states, logprobs, rewards = [], [], []
        for _ in range(8):
            state = env.state
            policy = Normal(agent.actor(state), agent.log_std.exp())
            force = policy.sample()
            logprobs.append(policy.log_prob(force).sum(1))
            states.append(state)
            _, reward = env.step(force)
            rewards.append(reward)
        returns = torch.stack(rewards).flip(0).cumsum(0).flip(0)
        values = agent.critic(torch.stack(states)).squeeze(-1)
        advantage = returns - values.detach()
        loss = -(torch.stack(logprobs) * advantage).mean() + 0.5 * (returns - values).square().mean()
        optimizer.zero_grad()
        loss.backward()
        all_reduce_gradients(agent)
        nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
        optimizer.step()
        mean_return = returns[0].mean()
        dist.all_reduce(mean_return)
        if rank == 0:
            print(f"update {update}: {mean_return.item() / dist.get_world_size():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
