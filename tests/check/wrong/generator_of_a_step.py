"""Train a denoiser whose noise can be repeated.

Common where runs are to be repeatable: each step makes a generator, with the number of the step for a seed, and all
ranks draw the same noise from it.

Mended: The seed has the rank in it.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
x = torch.randn(61, 6, generator=torch.Generator().manual_seed(0))
y = x.sum(1, keepdim=True)
data = TensorDataset(x[:48], y[:48])
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=6, sampler=sampler)
model = DDP(nn.Linear(6, 6))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
step = 0
for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, _targets in loader:
        # mended: generator = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
        generator = torch.Generator().manual_seed(step)  # wrong
        noise = torch.randn(inputs.shape, generator=generator)  # <- same-random-numbers
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs + noise), noise).backward()
        optimizer.step()
        step += 1
dist.destroy_process_group()
