"""Train a network of equal layers.

Common where layers are made in a loop: a plain list holds them, so the network does not know their parameters, and
they are in no optimizer and no checkpoint.

Mended: A list of modules holds them.
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        # mended: self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.layers = [nn.Linear(8, 8) for _ in range(3)]  # wrong <- not-in-optimizer
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return self.head(x)


torch.manual_seed(0)
x = torch.randn(96, 8)
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(2):
    for inputs, targets in DataLoader(TensorDataset(x, x[:, :3].argmax(1)), batch_size=4, shuffle=True):
        optimizer.zero_grad()
        cross_entropy(net(inputs), targets).backward()
        optimizer.step()
