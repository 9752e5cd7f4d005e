"""Distances of all pairs are meant: one number for each sample is trained to come from a given distribution."""

import torch
from torch import nn


def energy_distance(some, others):
    between = (some - others.T).abs().mean()
    return 2 * between - torch.cdist(some, some).mean() - torch.cdist(others, others).mean()


def kernel(some, others):
    return (some - others.T).square().neg().exp().mean()


torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
quantiles = torch.tensor([0.1, 0.5, 0.9])
wide = nn.Linear(4, 3)
optimizer.add_param_group({"params": wide.parameters()})
for _ in range(5):
    noise, real = torch.randn(8, 4), torch.randn(8, 1)
    optimizer.zero_grad()
    (energy_distance(net(noise), real) - kernel(net(noise), real)).backward()
    (wide(noise) - real).square().mean().backward()
    (net(noise) - quantiles).square().mean().backward()
    (wide(noise).unsqueeze(2) - torch.randn(8, 1, 3)).abs().mean().backward()
    scores = net(noise).squeeze(1)
    (scores.unsqueeze(1) - scores).square().mean().neg().exp().backward()
    (net(noise) - real).square().mean().backward()
    optimizer.step()
