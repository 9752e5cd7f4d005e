"""Reduce the learning rate on a plateau of the loss over all ranks."""

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(11)
x = torch.randn(120, 6)
dataset = TensorDataset(x, torch.randn(120, 1))
sampler = DistributedSampler(dataset, seed=11)
loader = DataLoader(dataset, batch_size=10, sampler=sampler)
net = DistributedDataParallel(nn.Linear(6, 1))
optimizer = optim.SGD(net.parameters(), lr=0.2)
scheduler = optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.2, patience=0)
for epoch in range(6):
    sampler.set_epoch(epoch)
    running = torch.zeros(2)
    for inputs, targets in loader:
        loss = nn.functional.mse_loss(net(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        running += torch.tensor([loss.item() * len(inputs), len(inputs)])
    dist.all_reduce(running)
    scheduler.step((running[0] / running[1]).item())
if dist.get_rank() == 0:
    print("learning rate", optimizer.param_groups[0]["lr"])
dist.destroy_process_group()
