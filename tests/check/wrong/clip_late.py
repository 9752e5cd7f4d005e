"""Train a recurrent network, with clipped gradients.

Common in loops that were moved around: clipping stands behind the step, and no step ever uses a clipped gradient.

Mended: It stands before.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(64, 6)
y = x[:, :3].argmax(1)
loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)

model = nn.GRU(6, 12, batch_first=True)
head = nn.Linear(12, 3)
parameters = [*model.parameters(), *head.parameters()]
optimizer = torch.optim.Adam(parameters, lr=1e-2)
for _ in range(2):
    for inputs, targets in loader:
        optimizer.zero_grad()
        states, _last = model(inputs.unsqueeze(1))
        nn.functional.cross_entropy(head(states[:, -1]), targets).backward()
        # mended: nn.utils.clip_grad_norm_(parameters, 0.5)
        optimizer.step()
        nn.utils.clip_grad_norm_(parameters, 0.5)  # wrong <- clip-misplaced
