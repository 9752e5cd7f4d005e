"""Classify sensor windows with local updates: the ranks meet every few steps and average their weights.

Common in averaging by hand: it goes through `parameters()`, in which the statistics of batch norm are not. Each
rank keeps statistics of its own share, and evaluates another network.

Mended: The averages are of weights and of the statistics of batch norm.
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


@torch.no_grad()
def meet(model):
    # mended: for value in (*model.parameters(), *model.buffers()):
    # mended:     if value.is_floating_point():
    # mended:         dist.all_reduce(value.data)
    # mended:         value /= dist.get_world_size()
    for weight in model.parameters():  # wrong <- replicas-drift
        dist.all_reduce(weight.data)  # wrong
        weight /= dist.get_world_size()  # wrong


def main(args):
    dist.init_process_group("gloo")
    torch.manual_seed(args.seed)
    windows = torch.randn(224, 1, 20)
    data = TensorDataset(windows, (windows.mean((1, 2)) > 0).long())
    sampler = DistributedSampler(data)
    loader = DataLoader(data, args.batch_size, sampler=sampler)
    body = [nn.Conv1d(1, 8, 5), nn.BatchNorm1d(8), nn.ReLU(), nn.Flatten(), nn.Linear(128, 2)]
    model = nn.Sequential(*body)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    steps = 0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()  # <- replicas-drift
            steps += 1
            if steps % args.local_steps == 0:
                meet(model)
        model.eval()
        with torch.no_grad():
            model(windows)
        model.train()
    meet(model)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--local-steps", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=2)
    main(parser.parse_args())
