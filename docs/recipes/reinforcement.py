"""Learn from episodes of any length, which each rank plays by itself."""

import torch
from torch import nn

import ddpkit


def play(policy: nn.Module, seed: int) -> tuple[torch.Tensor, int]:
    """Guess the sign of each number of an episode; return summed loss and steps."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(seed % 17 + 3, 1, generator=generator)
    chance = policy(numbers).sigmoid()
    chosen = (torch.rand(chance.shape, generator=generator) < chance).float()
    reward = (chosen == (numbers > 0).float()).float() * 2 - 1
    likelihood = torch.distributions.Bernoulli(chance).log_prob(chosen)
    return -(likelihood * reward).sum(), len(numbers)


def main() -> None:
    context = ddpkit.setup()
    torch.manual_seed(0)  # equal policies on every rank
    policy = nn.Linear(1, 1)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=0.05)
    for step in range(30):
        optimizer.zero_grad()
        steps = 0
        # on three ranks, uneven numbers of episodes
        for episode in range(context.rank, 10, context.world_size):
            loss, length = play(policy, ddpkit.sample_seed(0, step, episode))
            loss.backward()
            steps += length
        ddpkit.average_gradients(policy)
        ddpkit.global_mean(policy, steps)  # mean over all ranks' steps
        optimizer.step()
    if ddpkit.is_main_process():
        print("weight:", policy.weight.item())


if __name__ == "__main__":
    main()
