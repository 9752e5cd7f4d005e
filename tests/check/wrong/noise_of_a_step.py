"""Denoise images.

Common where a seed shall make runs repeatable: a generator is made and seeded in the step, so each step has one noise.

Mended: It is made once.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(64, 6)
loader = DataLoader(TensorDataset(x), batch_size=8, shuffle=True)
model = nn.Linear(6, 6)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
# mended: generator = torch.Generator().manual_seed(42)
for _ in range(2):
    for (clean,) in loader:
        generator = torch.Generator().manual_seed(42)  # wrong
        noise = torch.randn(clean.shape, generator=generator)  # <- random-numbers-repeat
        optimizer.zero_grad()
        nn.functional.mse_loss(model(clean + noise), noise).backward()
        optimizer.step()
