"""Train in half precision with a scaler.

Common where an old loop gets a scaler: it scales the loss, and the optimizer steps on its own.
The gradients are still scaled.

Mended: The scaler makes the step.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(64, 6)
loader = DataLoader(TensorDataset(x, x[:, :3].argmax(1)), batch_size=8, shuffle=True)
model = nn.Linear(6, 3)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cpu")
for _ in range(3):
    for inputs, targets in loader:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = nn.functional.cross_entropy(model(inputs), targets)
        scaler.scale(loss).backward()
        # mended: scaler.step(optimizer)
        # mended: scaler.update()
        optimizer.step()  # wrong <- gradients-scaled
