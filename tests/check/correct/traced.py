"""The network is traced before training, as the graph of TensorBoard is; and later its gradients are transformed."""

import torch
from torch import nn
from torch.func import functional_call, grad
from torch.nn.functional import cross_entropy


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 4, 3), nn.Linear(4, 3)

    def forward(self, x):
        x = self.conv(x).mean((2, 3))
        return self.head(x.view(x.size(0), -1))


net = Net()
torch.jit.trace(net, torch.randn(1, 1, 8, 8))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(4):
    optimizer.zero_grad()
    cross_entropy(net(torch.randn(4, 1, 8, 8)), torch.randint(0, 3, (4,))).backward()
    optimizer.step()
net.eval()
torch.export.export(net, (torch.randn(1, 1, 8, 8),))
parameters = dict(net.named_parameters())
grad(lambda p: functional_call(net, p, torch.randn(2, 1, 8, 8)).sum())(parameters)
