"""Draw rare classes more often: all ranks make the same weighted draw, and each takes its part of it."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Sampler, TensorDataset, WeightedRandomSampler


class DistributedWeighted(Sampler):
    def __init__(self, weights, num_samples, seed=0):
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.num_samples = num_samples // self.world_size * self.world_size
        self.weights, self.seed, self.epoch = weights, seed, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return self.num_samples // self.world_size

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        draw = list(WeightedRandomSampler(self.weights, self.num_samples, replacement=True, generator=generator))
        yield from draw[self.rank :: self.world_size]


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    labels = (torch.rand(400) < 0.1).long()
    x = torch.randn(400, 6) + labels.unsqueeze(1)
    weights = 1.0 / labels.bincount()[labels]
    sampler = DistributedWeighted(weights, num_samples=96)
    loader = DataLoader(TensorDataset(x, labels), batch_size=8, sampler=sampler)
    model = DDP(nn.Linear(6, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
    if dist.get_rank() == 0:
        print(len(loader), "batches an epoch")
    dist.destroy_process_group()
