"""Accumulate over three batches; an epoch has twenty.

meta-pytorch/torchtune#2745: the gradients of the last two go into the first step of the next epoch.

Mended: The last batch of an epoch makes a step as well.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(160, 6)
loader = DataLoader(TensorDataset(x, x[:, :3].argmax(1)), batch_size=8, shuffle=True)
model = nn.Linear(6, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    for number, (inputs, targets) in enumerate(loader):
        loss = nn.functional.cross_entropy(model(inputs), targets) / 3
        loss.backward()  # <- gradients-left-over
        # mended: if number % 3 == 2 or number == len(loader) - 1:
        if number % 3 == 2:  # wrong
            optimizer.step()
            optimizer.zero_grad()
