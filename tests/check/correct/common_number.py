"""The ranks hold different numbers of samples, and make as many steps of an epoch as the smallest part allows."""

from itertools import islice

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

BATCH = 6
PARTS = [61, 48, 55]


def first_batches(loader, number):
    yield from islice(loader, number)


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    data = torch.randn(PARTS[rank], 5, generator=torch.Generator().manual_seed(rank))
    loader = DataLoader(TensorDataset(data), BATCH, shuffle=True)
    network = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    per_epoch = min(PARTS[:world_size]) // BATCH
    for epoch in range(3):
        batches = first_batches(loader, per_epoch) if epoch else loader
        for number, (batch,) in enumerate(batches):
            if number >= per_epoch:
                break
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(network(batch[:, :4]), batch[:, 4:]).backward()
            optimizer.step()


if __name__ == "__main__":
    main()
