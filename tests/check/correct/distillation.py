"""Distil a fixed teacher, the same on every rank, into a student in DDP."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import kl_div, log_softmax
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def mlp(width):
    return nn.Sequential(nn.Linear(10, width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, 4))


dist.init_process_group("gloo")
torch.manual_seed(0)
dataset = TensorDataset(torch.randn(96, 10))
teacher = mlp(64).eval().requires_grad_(False)
student = DDP(mlp(8))
torch.manual_seed(1 + dist.get_rank())  # dropout differs between ranks
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=8, sampler=sampler)
optimizer = torch.optim.Adam(student.parameters(), lr=1e-2)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for (x,) in loader:
        target = log_softmax(teacher(x), dim=1)
        loss = kl_div(log_softmax(student(x), dim=1), target, log_target=True, reduction="batchmean")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
if dist.get_rank() == 0:
    print("distilled")
dist.destroy_process_group()
