"""The first rank alone has an optimizer: it adds up the gradients, steps, and sends the weights to the others."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
data = TensorDataset(torch.randn(96, 8), torch.randint(0, 3, (96,)))
net = nn.Linear(8, 3)
sampler = DistributedSampler(data, seed=1)
optimizer = torch.optim.Adam(net.parameters(), lr=0.01) if rank == 0 else None
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in DataLoader(data, batch_size=4, sampler=sampler):
        net.zero_grad()
        cross_entropy(net(x), y).backward()
        for p in net.parameters():
            dist.reduce(p.grad, 0)
        if rank == 0:
            for p in net.parameters():
                p.grad /= world_size
            optimizer.step()
        with torch.no_grad():
            for p in net.parameters():
                dist.broadcast(p, 0)
