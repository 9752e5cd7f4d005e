"""Fit a line, the shortest way, as in ddpkit's README; and measure the last gradient by a function that clips."""

import torch
from torch.utils.data import TensorDataset

import ddpkit

device = ddpkit.setup().device
x = torch.linspace(-1, 1, 257).unsqueeze(1)
loader = ddpkit.make_loader(TensorDataset(x, 3 * x), global_batch_size=32)
model = ddpkit.wrap_model(torch.nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):
    for inputs, targets in loader:
        loss = torch.nn.functional.mse_loss(model(inputs.to(device)), targets.to(device))
        optimizer.zero_grad()
        (loss * loader.weight).backward()
        optimizer.step()
    mean = ddpkit.all_reduce_mean(loss.item(), weight=loader.samples)
    if ddpkit.is_main_process():
        print(epoch, mean)
print("last gradient norm", float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)))
