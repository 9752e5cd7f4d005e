"""Train a model on a 2-D mesh: replicas of a sharded model."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
world_size = dist.get_world_size()
shards = 2 if world_size % 4 == 0 else 1
mesh = dist.init_device_mesh("cpu", (world_size // shards, shards), mesh_dim_names=("replicate", "shard"))
torch.manual_seed(0)
x = torch.randn(96, 12)
dataset = TensorDataset(x, x.mean(1, keepdim=True))
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=8, sampler=sampler)
model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 1))
fully_shard(model, mesh=mesh)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
if dist.get_rank() == 0:
    print("mesh", tuple(mesh.shape))
dist.destroy_process_group()
