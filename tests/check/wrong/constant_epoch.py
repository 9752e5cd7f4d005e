"""Resume a training at some epoch.

Common after resuming was added: the sampler is told the epoch at which the training began, in each epoch.

Mended: The sampler is told the present epoch.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(1)
x = torch.randn(48, 6)
data = TensorDataset(x, x.roll(1, dims=1))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=6, sampler=sampler)
model = DDP(nn.Linear(6, 6))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
first_epoch = 2
for epoch in range(first_epoch, 5):
    # mended: sampler.set_epoch(epoch)
    sampler.set_epoch(first_epoch)  # wrong <- epoch-not-set
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    if dist.get_rank() == 0:
        print("epoch", epoch)
dist.destroy_process_group()
