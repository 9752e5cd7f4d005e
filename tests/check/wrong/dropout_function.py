"""Train a network that calls dropout as a function.

Common: without `training=` the function drops in evaluation mode as well.

Mended: It gets the mode of the module.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(64, 6)
y = x[:, :3].argmax(1)
loader = DataLoader(TensorDataset(x[:48], y[:48]), batch_size=6, shuffle=True)
val_loader = DataLoader(TensorDataset(x[48:], y[48:]), batch_size=8)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(6, 16), nn.Linear(16, 3)

    def forward(self, inputs):
        # mended: return self.head(nn.functional.dropout(self.body(inputs).relu(), 0.3, self.training))
        return self.head(nn.functional.dropout(self.body(inputs).relu(), 0.3))  # wrong <- training-mode


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    model.train()
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        error = sum(nn.functional.cross_entropy(model(inputs), targets) for inputs, targets in val_loader)
