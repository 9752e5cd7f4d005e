"""Go back to the best weights at the end.

Common: `state_dict()` returns the weights themselves, which training goes on changing. The best ones are not kept.

Mended: They are copied.
"""

# mended: import copy

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(64, 6)
y = x[:, :3].argmax(1)
loader = DataLoader(TensorDataset(x[:48], y[:48]), batch_size=12, shuffle=True)
val_loader = DataLoader(TensorDataset(x[48:], y[48:]), batch_size=8)
model = nn.Linear(6, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
best_loss, best = float("inf"), None
for _ in range(2):
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    with torch.no_grad():
        loss = sum(nn.functional.cross_entropy(model(inputs), targets) for inputs, targets in val_loader)
    if loss < best_loss:
        # mended: best_loss, best = loss, copy.deepcopy(model.state_dict())
        best_loss, best = loss, model.state_dict()  # wrong
model.load_state_dict(best)  # <- loads-itself
