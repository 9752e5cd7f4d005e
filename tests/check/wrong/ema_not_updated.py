"""Validate a moving average of the weights.

MultimediaTechLab/YOLO#97: nothing calls the average's `update`, so each validation measures the initial weights.

Mended: Each step updates it.
"""

import copy

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(64, 6)
y = x[:, :3].argmax(1)
loader = DataLoader(TensorDataset(x[:48], y[:48]), batch_size=6, shuffle=True)
val_loader = DataLoader(TensorDataset(x[48:], y[48:]), batch_size=8)


class Average:
    def __init__(self, model, decay=0.9):
        self.module = copy.deepcopy(model)
        self.decay = decay

    @torch.no_grad()
    def update(self, model):
        for mean, value in zip(self.module.parameters(), model.parameters(), strict=True):
            mean.lerp_(value, 1 - self.decay)


@torch.no_grad()
def validate(network):
    return sum((network(inputs).argmax(1) == targets).sum() for inputs, targets in val_loader)  # <- average-stale


model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
average = Average(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        # mended: average.update(model)
    validate(average.module)
