"""Estimate prices, with a loader for each epoch.

Common in short training scripts: the loader is made in the head of the loop, and the sampler, made before it, is
never told the epoch. Every epoch has the same batches.

Mended: The loader is made in the head of the loop, and the sampler, made before it, is told the epoch.
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main(args):
    dist.init_process_group("gloo")
    torch.manual_seed(args.seed)
    features = torch.randn(112, 12)
    prices = features[:, :1].exp() + 0.1 * torch.randn(112, 1)
    data = TensorDataset(features, prices)
    sampler = DistributedSampler(data, seed=args.seed)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    for epoch in range(args.epochs):
        # mended: sampler.set_epoch(epoch)
        for step, (x, y) in enumerate(DataLoader(data, args.batch_size, sampler=sampler)):  # <- epoch-not-set
            loss = nn.functional.smooth_l1_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step == 0 and dist.get_rank() == 0:
                print(f"epoch {epoch}: loss {loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--seed", type=int, default=3)
    main(parser.parse_args())
