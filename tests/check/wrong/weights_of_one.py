"""Begin with weights of another training.

Common in fine-tuning: the main process alone loads them, after DDP has made all replicas equal.

Mended: All ranks load them.
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
weights = {"weight": torch.ones(1, 6), "bias": torch.zeros(1)}
model = DDP(nn.Linear(6, 1))
# mended: model.module.load_state_dict(weights)
if dist.get_rank() == 0:  # wrong <- replicas-differ-at-start
    model.module.load_state_dict(weights)  # wrong
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
dist.destroy_process_group()
