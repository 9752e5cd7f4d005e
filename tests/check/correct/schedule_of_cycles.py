"""A schedule for all epochs, which come in two cycles: the second one adds noise to the inputs."""

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

CYCLES, EPOCHS = 2, 4

dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(320, 6)
dataset = TensorDataset(x, x[:, :3].argmax(1))
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=8, sampler=sampler)
model = DistributedDataParallel(nn.Linear(6, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
schedule = CosineAnnealingLR(optimizer, T_max=CYCLES * EPOCHS * len(loader))
torch.manual_seed(dist.get_rank())
for cycle in range(CYCLES):
    for epoch in range(EPOCHS):
        sampler.set_epoch(cycle * EPOCHS + epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            noisy = inputs + 0.1 * cycle * torch.randn_like(inputs)
            nn.functional.cross_entropy(model(noisy), targets).backward()
            optimizer.step()
            schedule.step()
dist.destroy_process_group()
