"""Train on a stream that each rank and each of its workers reads a part of."""

import itertools

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Readings(IterableDataset):
    def __init__(self, n, rank, world_size):
        self.n, self.rank, self.world_size = n, rank, world_size
        self.epoch = 0

    def read(self):
        generator = torch.Generator().manual_seed(self.epoch)
        for i in torch.randperm(self.n, generator=generator).tolist():
            value = torch.tensor([i / self.n, (i % 7) / 7, (i % 11) / 11])
            yield value, value.sum(0, keepdim=True)

    def __iter__(self):
        info = get_worker_info()
        workers, worker = (info.num_workers, info.id) if info else (1, 0)
        yield from itertools.islice(self.read(), self.rank * workers + worker, None, self.world_size * workers)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    dataset = Readings(192, dist.get_rank(), dist.get_world_size())
    loader = DataLoader(dataset, batch_size=8, num_workers=2)
    model = DistributedDataParallel(nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        dataset.epoch = epoch
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
    if dist.get_rank() == 0:
        print("bias", model.module.bias.item())
    dist.destroy_process_group()
