"""All ranks draw the same order of the samples from equal generators, and each takes its part of every batch."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

BATCH = 16  # of all ranks together


def next_batch(data, rank, world_size):
    order = torch.randperm(len(data))
    share = BATCH // world_size
    begin = rank * share
    return data[order[begin : begin + share]]


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(21)
    data = torch.randn(400, 9)
    network = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    model = DistributedDataParallel(network)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(12):
        batch = next_batch(data, dist.get_rank(), dist.get_world_size())
        noise = torch.randn(BATCH, 8).chunk(dist.get_world_size())[dist.get_rank()]
        outputs = model(batch[:, :8] + 0.1 * noise)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(outputs, batch[:, 8:]).backward()
        optimizer.step()


if __name__ == "__main__":
    main()
