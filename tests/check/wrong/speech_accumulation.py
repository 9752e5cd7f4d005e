"""Train a speech encoder with gradient accumulation, without synchronisation in all but the last micro-batch.

modelscope/FunASR#3472: the condition is off by one. The first micro-batch of a window is synchronised and the
last, after which the optimizer steps, is not: each rank steps with gradients of its own.

Mended: The last micro-batch of each window is the one that synchronises.
"""

from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group(backend="gloo")
torch.manual_seed(1)

features = torch.randn(192, 40)
dataset = TensorDataset(features, features[:, :4].argmax(dim=1))
sampler = DistributedSampler(dataset, shuffle=True, seed=1)
dataloader = DataLoader(dataset, batch_size=4, sampler=sampler, drop_last=True)

model = DistributedDataParallel(nn.Sequential(nn.Linear(40, 32), nn.ReLU(), nn.Linear(32, 4)))
optim = torch.optim.Adam(model.parameters(), lr=1e-3)
accum_grad = 4

for epoch in range(2):
    sampler.set_epoch(epoch)
    for batch_idx, (speech, text) in enumerate(dataloader):
        my_context = nullcontext
        # mended: if (batch_idx + 1) % accum_grad != 0:
        if batch_idx % accum_grad != 0:  # wrong
            my_context = model.no_sync
        with my_context():  # <- gradients-not-averaged
            loss = nn.functional.cross_entropy(model(speech), text)
            (loss / accum_grad).backward()
        if (batch_idx + 1) % accum_grad == 0:
            optim.step()
            optim.zero_grad()

if dist.get_rank() == 0:
    print("trained", sum(p.numel() for p in model.parameters()), "parameters")
dist.destroy_process_group()
