"""Train the head of a network alone.

Common in fine-tuning: `requires_grad` is set on a module, where it is a new attribute that freezes nothing.

Mended: The method freezes the parameters.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(64, 6)
y = x[:, :3].argmax(1)
loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)

body = nn.Sequential(nn.Linear(6, 16), nn.ReLU())
# mended: body.requires_grad_(False)
body.requires_grad = False  # wrong <- requires-grad
model = nn.Sequential(body, nn.Linear(16, 3))
optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
for _ in range(2):
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
