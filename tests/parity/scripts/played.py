"""Samples that come from games of each rank, which one process does not play."""

import random

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
random.seed(dist.get_rank())
torch.manual_seed(0)
net = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for _ in range(5):
    net(torch.tensor([[random.random() for _ in range(3)]])).sum().backward()
    for parameter in net.parameters():
        dist.all_reduce(parameter.grad, dist.ReduceOp.SUM)
        parameter.grad /= dist.get_world_size()
    optimizer.step()
dist.destroy_process_group()
