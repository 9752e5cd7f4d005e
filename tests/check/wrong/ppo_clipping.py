"""Train a policy with PPO, on several processes that average gradients by hand.

horovod/horovod#1346 tells local from global clipping: here each rank clips its own gradient before the all-
reduce, to another length each time, and what is averaged is not the gradient of the loss any more.

Mended: The averaged gradient is clipped.
"""

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributions import Categorical


class Corridor:
    """Walk right to the end; the reward is there."""

    def __init__(self, seed, length=6):
        self.rng, self.length = np.random.default_rng(seed), length

    def reset(self):
        self.position = int(self.rng.integers(self.length - 1))
        return self.observe()

    def observe(self):
        return torch.tensor([self.position / self.length, self.rng.normal()], dtype=torch.float32)

    def step(self, action):
        self.position = max(0, self.position + (1 if action == 1 else -1))
        done = self.position == self.length
        return self.observe(), 10.0 if done else -0.1, done


def collect(env, agent, steps):
    observations, actions, logprobs, rewards, dones = [], [], [], [], []
    obs = env.reset()
    for _ in range(steps):
        with torch.no_grad():
            policy = Categorical(logits=agent["actor"](obs))
            action = policy.sample()
        observations.append(obs), actions.append(action), logprobs.append(policy.log_prob(action))
        obs, reward, done = env.step(action.item())
        rewards.append(reward), dones.append(done)
        if done:
            obs = env.reset()
    returns, running = [], 0.0
    for reward, done in zip(reversed(rewards), reversed(dones), strict=True):
        running = reward + 0.99 * running * (not done)
        returns.insert(0, running)
    return torch.stack(observations), torch.stack(actions), torch.stack(logprobs), torch.tensor(returns)


def main(num_updates=3, num_steps=64, minibatch=16, clip_coef=0.2, max_grad_norm=0.5):
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    agent = nn.ModuleDict(
        {
            "actor": nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2)),
            "critic": nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1)),
        }
    )
    optimizer = torch.optim.Adam(agent.parameters(), lr=2.5e-3, eps=1e-5)
    torch.manual_seed(1000 + rank)
    env = Corridor(seed=rank)
    for update in range(num_updates):
        obs, actions, logprobs, returns = collect(env, agent, num_steps)
        for indices in torch.randperm(num_steps).split(minibatch):
            policy = Categorical(logits=agent["actor"](obs[indices]))
            value = agent["critic"](obs[indices]).squeeze(1)
            advantage = returns[indices] - value.detach()
            ratio = (policy.log_prob(actions[indices]) - logprobs[indices]).exp()
            surrogate = torch.min(ratio * advantage, ratio.clamp(1 - clip_coef, 1 + clip_coef) * advantage)
            loss = -surrogate.mean() + 0.5 * (returns[indices] - value).square().mean() - 0.01 * policy.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), max_grad_norm)  # wrong <- clipped-before-averaging
            for param in agent.parameters():
                dist.all_reduce(param.grad)
                param.grad /= world_size
            # mended: nn.utils.clip_grad_norm_(agent.parameters(), max_grad_norm)
            optimizer.step()
        if rank == 0:
            print(f"update {update}: mean return on rank 0 {returns.mean().item():.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
