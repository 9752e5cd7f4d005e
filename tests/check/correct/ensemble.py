"""Trains an ensemble: each network has a DDP and a backward of its own, and one optimizer steps all."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    networks = [DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))) for _ in range(3)]
    optimizer = torch.optim.SGD([p for network in networks for p in network.parameters()], lr=0.05)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(5):
        x = torch.randn(12, 4, generator=generator)
        optimizer.zero_grad()
        for network in networks:
            nn.functional.mse_loss(network(x), x.sum(1, keepdim=True)).backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
