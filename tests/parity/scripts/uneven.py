"""ddpkit's loop over samples that no number of ranks divides; its argument is how many micro-batches a step has."""

import sys

import torch
from torch import nn
from torch.nn.functional import mse_loss

import ddpkit

micro_batches = int(sys.argv[1])
context = ddpkit.setup()
torch.manual_seed(0)
inputs = torch.randn(13, 5, dtype=torch.float64)
data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
loader = ddpkit.make_loader(data, global_batch_size=12, accumulation=micro_batches)
model = ddpkit.wrap_model(nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)).double())
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
for epoch in loader.epochs(4):
    for i, (x, y) in enumerate(loader):
        with ddpkit.accumulate(model, i, micro_batches, last=i + 1 == len(loader)) as complete:
            loss = mse_loss(model(x), y)
            weight = 1.0 if sys.argv[2:] == ["unweighted"] else loader.weight
            (loss * weight).backward()
        mean = ddpkit.all_reduce_mean(loss.item(), weight=loader.samples)
        if complete:
            optimizer.step()
            optimizer.zero_grad()
    if context.rank == 0:
        print(f"epoch {epoch}: {mean:.6f}")
