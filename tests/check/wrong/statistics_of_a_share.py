"""Normalize by statistics of the training samples.

Common where each process loads its share alone: mean and deviation are those of the share, and the
checkpoint has rank 0's.

Mended: They are those of all samples.
"""

import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(96, 5) * torch.rand(5)
y = x.sum(1, keepdim=True)
mine = slice(rank, None, world_size)
# mended: mean, deviation = x.mean(0), x.std(0)
mean, deviation = x[mine].mean(0), x[mine].std(0)  # wrong
inputs = (x[mine] - mean) / deviation
model = DDP(nn.Linear(5, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for _ in range(2):
    for batch, targets in zip(inputs.split(12), y[mine].split(12), strict=True):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(batch), targets).backward()
        optimizer.step()
    if rank == 0:
        state = {"model": model.module.state_dict(), "mean": mean, "deviation": deviation}
        torch.save(state, os.path.join(os.environ.get("OUT", tempfile.gettempdir()), "model.pt"))  # <- own-values-saved
dist.destroy_process_group()
