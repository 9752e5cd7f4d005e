"""Schedules that step after each optimizer step, as long as the training is on one rank."""

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS, WARM_UP = 4, 6

dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(330, 6)
dataset = TensorDataset(x, x[:, :3].argmax(1))
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=8, sampler=sampler)
model = DistributedDataParallel(nn.Linear(6, 3))
total = EPOCHS * len(loader)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
warm_up = lr_scheduler.LinearLR(optimizer, total_iters=WARM_UP)
cosine = lr_scheduler.CosineAnnealingLR(optimizer, T_max=total - WARM_UP)
schedule = lr_scheduler.SequentialLR(optimizer, [warm_up, cosine], [WARM_UP])
for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        schedule.step()
dist.destroy_process_group()
