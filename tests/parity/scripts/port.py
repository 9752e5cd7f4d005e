"""A port of `single.py` to DDP; its argument plants a mistake, which shows at the line that names it."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

plant = sys.argv[1] if len(sys.argv) > 1 else ""
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
inputs = torch.randn(367, 8)
targets = inputs.sum(1).gt(0).long()
train, test = TensorDataset(inputs[:336], targets[:336]), TensorDataset(inputs[336:], targets[336:])
net = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 2))
model = DistributedDataParallel(net)
rate = 0.01 * (world_size if plant == "rate" else 1)
optimizer = torch.optim.AdamW(net.parameters(), lr=rate)  # <- rate
sampler = DistributedSampler(train, seed=rank if plant == "repeat" else 0)
if plant == "same":
    sampler = DistributedSampler(train, num_replicas=1, rank=0)
if plant == "start" and rank == 1:
    with torch.no_grad():
        net[0].bias += 0.1
size = 24 if plant == "batch" else 24 // world_size
for epoch in range(3):
    model.train()
    sampler.set_epoch(epoch)
    for x, y in DataLoader(train, batch_size=size, sampler=sampler):
        optimizer.zero_grad()
        if plant in ("clip", "alone"):
            with model.no_sync():  # the forward pass, too: DDP decides there
                loss = cross_entropy(model(x), y)
                loss.backward()  # <- alone
            nn.utils.clip_grad_norm_(net.parameters(), 0.2 if plant == "clip" else 10.0)  # <- clip
            for p in net.parameters():
                if plant == "clip":
                    dist.all_reduce(p.grad)
                    p.grad /= world_size
        else:
            loss = cross_entropy(model(x), y)
            factor = {"twice": 1 / world_size, "sum": world_size}.get(plant, 1.0)
            if plant == "mean" and rank == 0:
                factor = 1.5
            (loss * factor).backward()  # <- twice, sum, mean
            nn.utils.clip_grad_norm_(net.parameters(), 0.2)
        optimizer.step()  # <- decay, between
        if plant == "decay":
            optimizer.param_groups[0]["weight_decay"] = 0.1
        if plant == "between":
            with torch.no_grad():
                net[0].bias.mul_(1 + rank)
                dist.all_reduce(net[0].bias)
    net.eval()
    shares = DistributedSampler(test, shuffle=False) if plant == "metric" else range(rank, len(test), world_size)
    counts = torch.zeros(2, dtype=torch.float64)
    with torch.no_grad():
        for x, y in DataLoader(test, batch_size=7, sampler=shares):
            counts += torch.tensor([(net(x).argmax(1) == y).sum(), len(y)])
    dist.all_reduce(counts)
    shown = loss.detach().clone()
    if plant != "local":
        dist.all_reduce(shown)
        shown /= world_size
    if rank == 0:
        print(f"epoch {epoch}: loss {shown.item():.4f}, right {counts[0] / counts[1]:.4f}")  # <- metric, local
dist.destroy_process_group()
