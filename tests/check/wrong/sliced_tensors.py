"""Evaluate slices of tensors.

Common where no loader is used: 13 samples are sliced over the ranks, and the means of 7 and of 6
are averaged as equals.

Mended: Sums are added up, and divided by the number of all.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
x = torch.randn(61, 6, generator=torch.Generator().manual_seed(0))
y = x.sum(1, keepdim=True)
data = TensorDataset(x[:48], y[:48])
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=6, sampler=sampler)
W = dist.get_world_size()
model = DDP(nn.Linear(6, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)


@torch.no_grad()
def evaluate():
    mine = slice(48 + dist.get_rank(), None, W)
    # mended: error = nn.functional.mse_loss(model(x[mine]), y[mine], reduction="sum")
    error = nn.functional.mse_loss(model(x[mine]), y[mine])  # wrong
    dist.all_reduce(error)  # <- mean-of-means
    # mended: return error / 13
    return error / W  # wrong


for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    evaluate()
dist.destroy_process_group()
