"""Accumulate the gradients of four micro-batches.

Common where a loss function of one's own and the loop both know of the accumulation: the loss is divided by
four, twice.

Mended: The loop alone divides.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(64, 6)
y = x[:, :3].argmax(1)
loader = DataLoader(TensorDataset(x, y), batch_size=2, shuffle=True)


def loss_of(logits, targets):
    # mended: return nn.functional.cross_entropy(logits, targets)
    return nn.functional.cross_entropy(logits, targets) / 4  # wrong <- wrong-divisor


model = nn.Linear(6, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    for number, (inputs, targets) in enumerate(loader):
        (loss_of(model(inputs), targets) / 4).backward()  # <- wrong-divisor
        if number % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
