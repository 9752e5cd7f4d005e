"""Train a regression, and log several errors of all processes.

meta-pytorch/torchrec#4648: strings in a set are in an order that hangs on the hash seed of the process, and each
rank has its own. Here a number is averaged for each name, in that order: the loss is added to the bias.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

LOGGED = {"loss", "absolute", "bias", "largest"}


def average(values):
    averages = {}
    for name in LOGGED:  # <- collective-order
        number = torch.tensor(values[name])
        dist.all_reduce(number)  # <- collective-order
        averages[name] = number.item() / dist.get_world_size()
    return averages


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(2)
    x = torch.randn(96, 3)
    data = TensorDataset(x, x.prod(1, keepdim=True))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    model = DistributedDataParallel(nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            outputs = model(inputs)
            loss = nn.functional.mse_loss(outputs, targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            errors = (outputs - targets).detach()
            averages = average(
                {
                    "loss": loss.item(),
                    "absolute": errors.abs().mean().item(),
                    "bias": errors.mean().item(),
                    "largest": errors.abs().max().item(),
                }
            )
        if dist.get_rank() == 0:
            print(averages)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
