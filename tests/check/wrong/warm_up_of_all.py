"""Train a classifier with a learning rate that rises for some steps, and then falls linearly to zero.

Common where a script of one process learns DDP: the schedule's length is still counted in batches of the whole
dataset. Each rank makes 1/N of these steps, so training ends at a high learning rate.

Mended: The length is counted in the loader's batches.
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def linear_with_warm_up(optimizer, warm_up, total):
    def rate(step):
        if step < warm_up:
            return (step + 1) / warm_up
        return max(0.0, (total - step) / (total - warm_up))

    return LambdaLR(optimizer, rate)  # <- schedule-length


def train_epoch(model, loader, optimizer, schedule):
    for number, (inputs, targets) in enumerate(loader):
        loss = nn.functional.cross_entropy(model(inputs), targets) / 2
        loss.backward()
        if number % 2:
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=8)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(480, 6)
    dataset = TensorDataset(x, x[:, :3].argmax(1))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)
    model = DistributedDataParallel(nn.Linear(6, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    total = args.epochs * len(dataset) // 8 // 2  # wrong
    # mended: total = args.epochs * len(loader) // 2
    schedule = linear_with_warm_up(optimizer, 10, total)  # <- schedule-length
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        train_epoch(model, loader, optimizer, schedule)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
