"""Counts the batches of an epoch and asks for each, as trainers do that time their data."""

import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def train_one_epoch(model, loader, optimizer):
    seconds = 0.0
    batches = iter(loader)
    for _ in range(len(loader)):
        start = time.perf_counter()
        inputs, targets = next(batches)
        seconds += time.perf_counter() - start
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    return seconds / len(loader)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(int(os.environ["RANK"]))
    data = TensorDataset(torch.randn(256, 10), torch.randint(0, 3, (256,)))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        waited = train_one_epoch(model, loader, optimizer)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: waited {1000 * waited:.2f} ms for each batch")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
