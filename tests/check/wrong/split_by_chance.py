"""Predict prices, and validate on a fifth of them.

Common where ranks have seeds of their own: each process splits the data at random, so the training part of one rank
holds samples of another's validation part.

Mended: The split has a generator with one seed.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split

dist.init_process_group("gloo")
features = torch.randn(120, 9, generator=torch.Generator().manual_seed(8))
prices = features.sum(1, keepdim=True)
torch.manual_seed(42 + dist.get_rank())
same = torch.Generator().manual_seed(42)
dataset = TensorDataset(features, prices)
# mended: train_set, val_set = random_split(dataset, [96, 24], generator=same)
train_set, val_set = random_split(dataset, [96, 24])  # wrong <- split-differs
sampler = DistributedSampler(train_set)
loader = DataLoader(train_set, batch_size=8, sampler=sampler)
val_loader = DataLoader(val_set, batch_size=8, sampler=DistributedSampler(val_set, shuffle=False))
model = DDP(nn.Sequential(nn.Linear(9, 16), nn.ReLU(), nn.Linear(16, 1)))
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    with torch.no_grad():
        error = sum(nn.functional.mse_loss(model(x), y, reduction="sum") for x, y in val_loader)
    dist.all_reduce(error)
dist.destroy_process_group()
