"""Start a process for each GPU, as the tutorials do."""

import os
import random
import shutil
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def setup(rank, world_size):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = "12355"
    dist.init_process_group("nccl", rank=rank, world_size=world_size)


class Trainer:
    def __init__(self, model, loader, rank):
        self.rank = rank
        self.model = DDP(model.to(rank), device_ids=[rank])
        self.loader = loader
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def train(self, epochs):
        for epoch in range(epochs):
            self.loader.sampler.set_epoch(epoch)
            for inputs, targets in self.loader:
                loss = nn.functional.mse_loss(self.model(inputs.to(self.rank)), targets.to(self.rank))
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()


def main(rank, world_size, epochs, seed):
    setup(rank, world_size)
    seeds = [None] * world_size
    dist.all_gather_object(seeds, seed)
    assert len(set(seeds)) == 1
    torch.manual_seed(int(1000 * seed))
    dataset = TensorDataset(torch.randn(64, 4), torch.randn(64, 2))
    sampler = DistributedSampler(dataset, num_replicas=world_size, rank=rank)
    Trainer(nn.Linear(4, 2), DataLoader(dataset, batch_size=8, sampler=sampler), rank).train(epochs)
    dist.destroy_process_group()


if __name__ == "__main__":
    world_size = torch.cuda.device_count() or 2
    folder = Path(tempfile.gettempdir(), f"spawned-{os.getppid()}")
    folder.mkdir()  # once: a second process would fail
    torch.save({"epochs": 2}, folder / "settings.pt")
    try:
        mp.spawn(main, args=(world_size, 2, random.random()), nprocs=world_size, join=True)
    finally:
        shutil.rmtree(folder)
