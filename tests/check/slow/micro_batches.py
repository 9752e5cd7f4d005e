"""Accumulates four micro-batches, and lets DDP average after each: three of four exchanges are for nothing."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

MICRO_BATCHES = 4


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(6):
        for _ in range(MICRO_BATCHES):
            x = torch.randn(16, 8, generator=generator)
            loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
            (loss / MICRO_BATCHES).backward()  # <- exchanges-too-often
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
