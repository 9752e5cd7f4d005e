"""Validate a sampler with fixed noise.

Common: the validation seeds the global generator, so each epoch trains with the noise and the order of the one before.

Mended: The validation has a generator of its own.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
x = torch.randn(96, 6)
sampler = DistributedSampler(TensorDataset(x))
loader = DataLoader(TensorDataset(x), batch_size=8, sampler=sampler)
model = DDP(nn.Linear(6, 6))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


@torch.no_grad()
def validate():
    # mended: generator = torch.Generator().manual_seed(7)
    # mended: noise = torch.randn(16, 6, generator=generator)
    torch.manual_seed(7 + rank)  # wrong <- random-numbers-repeat
    noise = torch.randn(16, 6)  # wrong
    return model.module(noise).square().mean()


torch.manual_seed(rank)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for (inputs,) in loader:
        optimizer.zero_grad()
        noise = torch.randn_like(inputs)
        nn.functional.mse_loss(model(inputs + noise), inputs).backward()
        optimizer.step()
    validate()
dist.destroy_process_group()
