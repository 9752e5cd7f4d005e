"""Each rank divides the sum of its losses, in two micro-batches, by the samples of all ranks; gradients are summed."""

import torch
import torch.distributed as dist
from torch.nn import functional

SAMPLES = 24  # of a step, on all ranks together
PARTS = 2


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(5, 12), torch.nn.GELU(), torch.nn.Linear(12, 3))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    own = torch.Generator().manual_seed(20 + dist.get_rank())
    for _ in range(8):
        optimizer.zero_grad()
        for _ in range(PARTS):
            inputs = torch.randn(SAMPLES // PARTS // dist.get_world_size(), 5, generator=own)
            losses = functional.cross_entropy(network(inputs), inputs[:, :3].argmax(1), reduction="none")
            (losses.sum() / SAMPLES).backward()
        gradients = torch.cat([parameter.grad.flatten() for parameter in network.parameters()])
        dist.all_reduce(gradients)
        position = 0
        for parameter in network.parameters():
            parameter.grad = gradients[position : position + parameter.numel()].view_as(parameter)
            position += parameter.numel()
        optimizer.step()


if __name__ == "__main__":
    main()
