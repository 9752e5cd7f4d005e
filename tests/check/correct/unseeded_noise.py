"""Noise from NumPy and Python, which nobody seeds: each process starts with other numbers, as processes do."""

import random

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Noisy(Dataset):
    """Points to which each access adds noise, and which it mirrors at random."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.points = torch.randn(240, 4, generator=generator)

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        point = self.points[index]
        noise = torch.from_numpy(np.random.normal(0, 0.1, 4)).float()
        sign = 1 if random.random() < 0.5 else -1
        return sign * (point + noise), point.sum().view(1) * sign


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = Noisy()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=10, sampler=sampler)
    model = DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
