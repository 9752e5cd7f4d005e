"""Predict a number.

Common in regression: predictions have a dimension more than targets, so each prediction is compared with all targets,
and the network learns their mean.

Mended: Both have one dimension.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(64, 6)
y = x.sum(1)
loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)

model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(2):
    for inputs, targets in loader:
        predictions = model(inputs)
        # mended: predictions = predictions.squeeze(1)
        optimizer.zero_grad()
        nn.functional.mse_loss(predictions, targets).backward()  # <- shapes-broadcast
        optimizer.step()
