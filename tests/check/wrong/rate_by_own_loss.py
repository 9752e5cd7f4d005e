"""Lower the learning rate where the loss is small.

Common in schedules by hand: the loss is that of the rank's own samples, so the ranks have different learning rates.

Mended: The loss is averaged over ranks before.
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
model = DDP(nn.Linear(6, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        level = loss.detach()
        # mended: dist.all_reduce(level)
        # mended: level /= dist.get_world_size()
        optimizer.param_groups[0]["lr"] = 0.01 / (1.0 + level.item())  # <- replicas-drift
dist.destroy_process_group()
