"""Local updates whose averages come more rarely than a check has steps, after one common step at the start."""

import torch
import torch.distributed as dist
from torch import nn

EVERY = 100


def average(model: nn.Module) -> None:
    for weight in model.parameters():
        dist.all_reduce(weight.data)
        weight.data /= dist.get_world_size()


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(1 + dist.get_rank())
    for step in range(1000):
        x = torch.randn(8, 5)
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
        if step % EVERY == 0:
            average(model)
    average(model)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
