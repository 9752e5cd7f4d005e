"""Scale the learning rate with the number of ranks, after a warm-up: the global batch grows with them on purpose."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main(args):
    dist.init_process_group("gloo")
    torch.manual_seed(args.seed)
    x = torch.randn(192, 8)
    dataset = TensorDataset(x, x.square().mean(1, keepdim=True))
    sampler = DistributedSampler(dataset, seed=args.seed)
    loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)))
    lr = args.base_lr * dist.get_world_size()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    warmup = args.warmup_epochs * len(loader)
    total = args.epochs * len(loader)
    scheduler = SequentialLR(
        optimizer,
        [
            LinearLR(optimizer, 1 / dist.get_world_size(), total_iters=warmup),
            CosineAnnealingLR(optimizer, total - warmup),
        ],
        milestones=[warmup],
    )
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            scheduler.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: learning rate {scheduler.get_last_lr()[0]:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", type=int, default=16, help="samples per step and rank")
    parser.add_argument("--base-lr", type=float, default=0.02, help="learning rate for one rank")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--warmup-epochs", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    main(parser.parse_args())
