"""Generators that all ranks have alike: for the positions of a global batch, and for the width of the next images."""

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    images = torch.rand(200, 24)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(12, 8), nn.Dropout(0.1), nn.ReLU(), nn.Linear(8, 12)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    positions = torch.Generator().manual_seed(7)
    widths = np.random.default_rng(7)
    torch.manual_seed(1 + rank)
    for _ in range(200):
        chosen = torch.randperm(len(images), generator=positions)[: 8 * world_size]
        offset = int(12 * widths.random())
        x = images[chosen[rank::world_size], offset : offset + 12]
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x + 0.1 * torch.randn_like(x)), x).backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
