"""Validate after each epoch.

Common where the validation is a function: it turns the evaluation mode on, and nobody turns it off. From the second
epoch on there is no dropout, and batch norm learns no statistics.

Mended: Each epoch begins with the training mode.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(64, 6)
y = x[:, :3].argmax(1)
loader = DataLoader(TensorDataset(x[:48], y[:48]), batch_size=6, shuffle=True)
val_loader = DataLoader(TensorDataset(x[48:], y[48:]), batch_size=8)


@torch.no_grad()
def validate(model):
    model.eval()  # <- evaluation-mode
    return sum((model(inputs).argmax(1) == targets).sum() for inputs, targets in val_loader)


model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    # mended: model.train()
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    validate(model)
