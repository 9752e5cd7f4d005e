"""Train a generator against a critic: two networks, two optimizers, gradients averaged by hand."""

import torch
from torch import nn

import ddpkit


def noise(step: int, samples: range) -> torch.Tensor:
    """Draw each sample's own noise, so that the run does not depend on the number of ranks."""
    generators = [torch.Generator().manual_seed(ddpkit.sample_seed(0, step, i)) for i in samples]
    return torch.stack([torch.randn(2, generator=generator) for generator in generators])


def main() -> None:
    context = ddpkit.setup()
    torch.manual_seed(0)  # equal networks on every rank
    fake, critic = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 1))
    makes, judges = torch.optim.AdamW(fake.parameters(), 0.01), torch.optim.AdamW(critic.parameters(), 0.01)
    mine = range(context.rank, 12, context.world_size)  # of each batch
    for step in range(40):
        real = noise(1_000 + step, mine) * 0.1 + 2
        critic.zero_grad()
        (critic(fake(noise(step, mine)).detach()) - critic(real)).tanh().mean().backward()
        ddpkit.average_gradients(critic)
        judges.step()
        fake.zero_grad()
        (-critic(fake(noise(step, mine)))).mean().backward()
        ddpkit.average_gradients(fake)  # the critic's gradients of this pass are not used
        makes.step()
    ddpkit.check_replicas([fake, critic])
    if ddpkit.is_main_process():
        print("centre:", fake.bias.mean().item())


if __name__ == "__main__":
    main()
