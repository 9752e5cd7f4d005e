"""Train a network with BatchNorm and validate it on rank 0.

jpata/particleflow#233: the forward pass of DDP broadcasts the buffers. Rank 0 calls it for validation and the
others do not, so its collectives and theirs do not meet any more, and the ranks wait for each other.

Mended: Rank 0 validates the module inside DDP, whose forward pass does not communicate.
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


@torch.no_grad()
def validate(model, loader):
    model.eval()
    total = 0.0
    for x, y in loader:
        total += nn.functional.cross_entropy(model(x), y, reduction="sum").item()
    model.train()
    return total / len(loader.dataset)


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    rank = dist.get_rank()
    torch.manual_seed(0)
    x = torch.randn(96 + 40, 9)
    y = (x[:, 0] > 0).long()
    train, valid = TensorDataset(x[:96], y[:96]), TensorDataset(x[96:], y[96:])
    sampler = DistributedSampler(train)
    train_loader = DataLoader(train, batch_size=12, sampler=sampler)
    valid_loader = DataLoader(valid, batch_size=20)
    model = DDP(nn.Sequential(nn.Linear(9, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, targets in train_loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
        if rank == 0:
            # mended: print(f"epoch {epoch}: loss {validate(model.module, valid_loader):.4f}")
            print(f"epoch {epoch}: loss {validate(model, valid_loader):.4f}")  # wrong <- collective-order
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
