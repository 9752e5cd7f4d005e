"""Show a batch of a loader without shards, then train on another loader, with a sampler."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
dataset = TensorDataset(torch.randn(96, 4), torch.randn(96, 1))
inputs, targets = next(iter(DataLoader(dataset, batch_size=8, shuffle=True)))
print(f"inputs from {inputs.min():.2f} to {inputs.max():.2f}")
sampler = DistributedSampler(dataset)
model = DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, targets in DataLoader(dataset, batch_size=8, sampler=sampler):
        optimizer.zero_grad()
        mse_loss(model(inputs), targets).backward()
        optimizer.step()
dist.destroy_process_group()
