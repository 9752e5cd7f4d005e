"""Classify by the negative log-likelihood.

Common: the network ends in a softmax where the loss takes logarithms, so it falls below zero.

Mended: It ends in a log-softmax.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(64, 6)
loader = DataLoader(TensorDataset(x, x[:, :3].argmax(1)), batch_size=8, shuffle=True)
# mended: model = nn.Sequential(nn.Linear(6, 3), nn.LogSoftmax(dim=1))
model = nn.Sequential(nn.Linear(6, 3), nn.Softmax(dim=1))  # wrong
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
criterion = nn.NLLLoss()
for _ in range(2):
    for inputs, targets in loader:
        optimizer.zero_grad()
        criterion(model(inputs), targets).backward()  # <- not-log-probabilities
        optimizer.step()
