"""Start two processes, which become ranks when they run."""

import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
from spawned_ranks import Trainer
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def setup(rank, world_size):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = "12355"
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
    dist.init_process_group("nccl")


def main(rank, world_size, epochs):
    setup(rank, world_size)
    torch.manual_seed(0)
    dataset = TensorDataset(torch.randn(64, 4), torch.randn(64, 2))
    sampler = DistributedSampler(dataset, num_replicas=world_size, rank=rank)
    Trainer(nn.Linear(4, 2), DataLoader(dataset, batch_size=8, sampler=sampler), rank).train(epochs)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.set_start_method("spawn")
    processes = [mp.Process(target=main, args=(rank, 2, 2)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert all(process.exitcode == 0 for process in processes)
