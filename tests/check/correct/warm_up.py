"""The learning rate rises for half of the steps, and is constant for the others."""

import functools

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS = 3


def rising(step, *, length):
    return (step + 1) / length if step < length else 1.0


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    points = torch.randn(96, 5)
    dataset = TensorDataset(points, points.amax(1, keepdim=True))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=6, sampler=sampler)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(5, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = LambdaLR(optimizer, functools.partial(rising, length=EPOCHS * len(loader) // 2))
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            torch.nn.functional.smooth_l1_loss(model(inputs), targets).backward()
            optimizer.step()
            schedule.step()


if __name__ == "__main__":
    main()
