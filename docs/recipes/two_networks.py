"""Train a generator against a critic, with gradients averaged after `backward()`."""

import torch
from torch import nn

import ddpkit


def noise(step: int, samples: range) -> torch.Tensor:
    """Draw each sample's own noise, which does not depend on the number of ranks."""
    drawn = []
    for sample in samples:
        seed = ddpkit.sample_seed(0, step, sample)
        drawn.append(torch.randn(2, generator=torch.Generator().manual_seed(seed)))
    return torch.stack(drawn)


def main() -> None:
    context = ddpkit.setup()
    torch.manual_seed(0)  # equal networks on every rank
    fake = nn.Linear(2, 2)
    critic = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 1))
    makes = torch.optim.AdamW(fake.parameters(), 0.01)
    judges = torch.optim.AdamW(critic.parameters(), 0.01)
    mine = range(context.rank, 12, context.world_size)  # this rank's part of each batch
    weight = len(mine) * context.world_size / 12  # as loader.weight: uneven parts
    for step in range(40):
        real = noise(1_000 + step, mine) * 0.1 + 2
        critic.zero_grad()
        difference = critic(fake(noise(step, mine)).detach()) - critic(real)
        (difference.tanh().mean() * weight).backward()
        ddpkit.average_gradients(critic)
        judges.step()
        fake.zero_grad()
        (-critic(fake(noise(step, mine))).mean() * weight).backward()
        # the critic's gradients of this pass are not used
        ddpkit.average_gradients(fake)
        makes.step()
    ddpkit.check_replicas([fake, critic])
    if ddpkit.is_main_process():
        print("centre:", fake.bias.mean().item())


if __name__ == "__main__":
    main()
