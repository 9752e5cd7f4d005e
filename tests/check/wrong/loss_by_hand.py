"""Predict a number, with a loss that is written by hand.

Common in regression: predictions have the shape (n, 1) and targets (n,), so their difference has n * n elements.

Mended: Both have one dimension.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(96, 8)
net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
for _ in range(2):
    for inputs, targets in DataLoader(TensorDataset(x, x.sum(1)), batch_size=4, shuffle=True):
        # mended: loss = (net(inputs).squeeze(1) - targets).pow(2).mean() / 2
        loss = (net(inputs) - targets).pow(2).mean() / 2  # wrong
        optimizer.zero_grad()
        loss.backward()  # <- shapes-broadcast
        optimizer.step()
