"""Train a Wasserstein GAN: two networks in DDP, several steps of the critic for one of the generator."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Generator(nn.Module):
    def __init__(self, latent_dim=6):
        super().__init__()
        self.latent_dim = latent_dim
        self.net = nn.Sequential(nn.Linear(latent_dim, 32), nn.ReLU(), nn.Linear(32, 2))

    def forward(self, z):
        return self.net(z)


def main(n_critic=2, clip_value=0.05):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    generator = DDP(Generator())
    critic = DDP(nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1)))
    optimizer_G = torch.optim.RMSprop(generator.parameters(), lr=1e-3)
    optimizer_D = torch.optim.RMSprop(critic.parameters(), lr=1e-3)
    angles = torch.linspace(0, 6.28, 192)
    dataset = TensorDataset(torch.stack([angles.cos(), angles.sin()], dim=1))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=16, sampler=sampler)
    torch.manual_seed(rank)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for i, (real,) in enumerate(loader):
            with torch.no_grad():
                fake = generator(torch.randn(len(real), 6))
            optimizer_D.zero_grad()
            scores = critic(torch.cat([real, fake]))
            loss_D = scores[len(real) :].mean() - scores[: len(real)].mean()
            loss_D.backward()
            optimizer_D.step()
            for p in critic.parameters():
                p.data.clamp_(-clip_value, clip_value)
            if i % n_critic == n_critic - 1:
                optimizer_G.zero_grad()
                loss_G = -critic(generator(torch.randn(len(real), 6))).mean()
                loss_G.backward()
                optimizer_G.step()
    if rank == 0:
        print("critic's weights within", clip_value)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
