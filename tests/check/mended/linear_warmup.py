"""Fine-tune with a warm-up, and a rate that falls to nothing by the last step.

The steps are counted in the rank's own loader.
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def get_schedule(optimizer, warmup, total):
    def factor(step):
        return min(step / max(1, warmup), (total - step) / max(1, total - warmup))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def main(args):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    tokens = torch.randint(0, 30, (256, 5))
    data = TensorDataset(tokens, tokens.sum(1) % 3)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, args.batch_size, sampler=sampler)
    model = DistributedDataParallel(nn.Sequential(nn.EmbeddingBag(30, 16), nn.Linear(16, 3)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    total = args.epochs * len(loader)
    schedule = get_schedule(optimizer, total // 10, total)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            schedule.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1e-3)
    main(parser.parse_args())
