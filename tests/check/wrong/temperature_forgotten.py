"""Train two towers with a temperature.

Common where parameters are listed by hand: the temperature is in no list, and never changes.

Mended: The optimizer gets all parameters of the model.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(64, 6)
y = x[:, :3].argmax(1)
loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(3, 8), nn.Linear(3, 8)
        self.temperature = nn.Parameter(torch.tensor(2.0))

    def forward(self, inputs):
        left, right = self.left(inputs[:, :3]), self.right(inputs[:, 3:])
        return left @ right.T * self.temperature.exp()


model = Towers()  # <- not-in-optimizer
# mended: optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
optimizer = torch.optim.SGD([*model.left.parameters(), *model.right.parameters()], lr=0.01)  # wrong
for _ in range(2):
    for inputs, _labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), torch.arange(len(inputs))).backward()
        optimizer.step()
