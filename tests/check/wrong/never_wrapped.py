"""Train on the shares of a sampler.

Common in examples that wrap the model only where there are GPUs: on CPUs each process trains a model of its own.

Mended: The model is wrapped on every device.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
x = torch.randn(96, 6, generator=torch.Generator().manual_seed(0))
dataset = TensorDataset(x, x[:, :3].argmax(1))
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=8, sampler=sampler)
model = nn.Linear(6, 3)
# mended: model = DistributedDataParallel(model)
if torch.cuda.is_available():  # wrong
    model = DistributedDataParallel(model.cuda(), device_ids=[dist.get_rank()])  # wrong
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()  # <- gradients-not-averaged
dist.destroy_process_group()
