"""Adapt a network to a new task: a small adapter is added beside the layers that were there.

pytorch/pytorch#12603: DDP registers its hooks on the parameters that exist when it is constructed. The
adapter comes later: it is trained, but each rank's alone.

Mended: The adapter is added before the model is wrapped.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(20, 32)
        self.adapter = nn.Identity()
        self.head = nn.Linear(32, 3)

    def forward(self, x):
        h = torch.relu(self.body(x))
        return self.head(h + self.adapter(h))


def add_adapter(net):
    net.adapter = nn.Sequential(nn.Linear(32, 4), nn.Tanh(), nn.Linear(4, 32))


dist.init_process_group("gloo")
torch.manual_seed(0)
net = Net()
# mended: add_adapter(net)
model = DDP(net)
add_adapter(model.module)  # wrong <- gradients-not-averaged
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

x = torch.randn(96, 20)
dataset = TensorDataset(x, x[:, :3].argmax(1))
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=8, sampler=sampler)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
if dist.get_rank() == 0:
    print(f"{len(list(model.parameters()))} tensors trained")
dist.destroy_process_group()
