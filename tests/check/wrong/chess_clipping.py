"""Train a network whose gradients are averaged and clipped by hand.

LeelaChessZero/lczero-training#162: each process clips its gradient to its own norm, so that its share of the sum is
scaled by another factor, and the sum points in another direction.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def clip(parameters, largest):
    norm = torch.sqrt(sum(p.grad.square().sum() for p in parameters))
    factor = (largest / (norm + 1e-6)).clamp(max=1.0)
    for p in parameters:
        p.grad.mul_(factor)  # <- clipped-before-averaging


def average(parameters):
    for p in parameters:
        dist.all_reduce(p.grad)
        p.grad.div_(dist.get_world_size())


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(160, 6)
    data = TensorDataset(x, 10 * x.sum(1, keepdim=True))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 8, sampler=sampler)
    model = nn.Linear(6, 1)
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.01)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            clip(parameters, 1.0)  # <- clipped-before-averaging
            average(parameters)
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
