"""Train and log: each rank to a file of its own, rank 0 to the screen as well."""

import logging
import os
import sys
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def make_logger(rank):
    folder = os.path.join(os.environ.get("OUT", tempfile.gettempdir()), "logs")
    os.makedirs(folder, exist_ok=True)
    handlers = [logging.FileHandler(os.path.join(folder, f"rank_{rank}.log"), mode="w")]
    if rank == 0:
        handlers.append(logging.StreamHandler(sys.stdout))
    logging.basicConfig(level=logging.INFO, format=f"[{rank}] %(message)s", handlers=handlers)
    return logging.getLogger("train")


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    logger = make_logger(rank)
    torch.manual_seed(0)
    x = torch.randn(72, 5)
    dataset = TensorDataset(x, x[:, :1] - x[:, 1:2])
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=6, sampler=sampler)
    model = DDP(nn.Linear(5, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for step, (inputs, targets) in enumerate(loader):
            loss = nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            logger.info("epoch %d, step %d: loss of this rank %.4f", epoch, step, loss.item())
    logger.info("done")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
