"""Measure how far predicted ages are off, on a validation set that does not divide by the number of ranks.

The counts are gathered as well, and weigh the errors.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


def mean_error(model, loader):
    total, count = 0.0, 0
    with torch.no_grad():
        for x, age in loader:
            total += (model(x) - age).abs().sum().item()
            count += len(x)
    own = torch.tensor([total, count])
    errors = [torch.empty(2) for _ in range(dist.get_world_size())]
    dist.all_gather(errors, own)
    total, count = sum(errors).tolist()
    return total / count


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    faces = torch.randn(129, 8)
    people = TensorDataset(faces, 40 + 10 * faces[:, :1])
    train, validation = Subset(people, range(80)), Subset(people, range(80 + rank, 129, world_size))
    sampler = DistributedSampler(train)
    loader = DataLoader(train, 8, sampler=sampler)
    model = DistributedDataParallel(nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for x, age in loader:
            optimizer.zero_grad()
            nn.functional.l1_loss(model(x), age).backward()
            optimizer.step()
        error = mean_error(model.module, DataLoader(validation, 8))
        if rank == 0:
            print(f"epoch {epoch}: {error:.2f} years")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
