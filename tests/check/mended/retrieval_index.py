"""Train an encoder whose index is built between epochs, by the whole model in double precision.

The index is built with a copy of the model.
"""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


@torch.no_grad()
def build_index(encoder, passages):
    encoder = copy.deepcopy(encoder).eval().double()
    return encoder(passages.double()).float()


dist.init_process_group("gloo")
torch.manual_seed(2)
passages = torch.randn(40, 16)
questions = passages.repeat(3, 1) + 0.1 * torch.randn(120, 16)
dataset = TensorDataset(questions, torch.arange(120) % 40)
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=10, sampler=sampler)
model = DDP(nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8)))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

index = torch.zeros(40, 8)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for question, passage in loader:
        loss = nn.functional.cross_entropy(model(question) @ index.T, passage)
        loss = loss + model(passages[passage]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    index = build_index(model.module, passages)
if dist.get_rank() == 0:
    print("index of", tuple(index.shape))
dist.destroy_process_group()
