"""Accumulate gradients in DDP; the last window of an epoch is shorter."""

import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

ACCUMULATE = 4


def windows(loader):
    batches = []
    for batch in loader:
        batches.append(batch)
        if len(batches) == ACCUMULATE:
            yield batches
            batches = []
    if batches:
        yield batches


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(120, 9)
    dataset = TensorDataset(x, x[:, 3:6].argmax(1))
    sampler = DistributedSampler(dataset, shuffle=True)
    loader = DataLoader(dataset, batch_size=10, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(9, 24), nn.ELU(), nn.Linear(24, 3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, nesterov=True, momentum=0.9)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for window in windows(loader):
            optimizer.zero_grad()
            for i, (inputs, targets) in enumerate(window):
                last = i == len(window) - 1
                with contextlib.nullcontext() if last else model.no_sync():
                    loss = F.cross_entropy(model(inputs), targets) / len(window)
                    loss.backward()
            optimizer.step()
    if dist.get_rank() == 0:
        print("last loss of rank 0", loss.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
