"""Accumulate the gradients of four micro-batches.

Common when accumulation was added to a loop: gradients are still set to zero at its head, so a step has those of the
last micro-batch alone.

Mended: They are set to zero once a step.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(128, 6)
data = TensorDataset(x, x[:, :3].argmax(1))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=4, sampler=sampler)
model = DDP(nn.Linear(6, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for number, (inputs, targets) in enumerate(loader):
        optimizer.zero_grad()  # wrong <- gradients-discarded
        (nn.functional.cross_entropy(model(inputs), targets) / 4).backward()
        if number % 4 == 3:
            optimizer.step()
            # mended: optimizer.zero_grad()
dist.destroy_process_group()
