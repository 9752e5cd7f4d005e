"""Train a classifier.

Common when lines are sorted wrongly: gradients are set to zero between the backward pass and the step, which changes
nothing.

Mended: They are set to zero after the step.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(64, 6)
y = x[:, :3].argmax(1)
loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)

model = nn.Linear(6, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    for inputs, targets in loader:
        nn.functional.cross_entropy(model(inputs), targets).backward()
        model.zero_grad()  # wrong <- gradients-discarded
        optimizer.step()
        # mended: model.zero_grad()
