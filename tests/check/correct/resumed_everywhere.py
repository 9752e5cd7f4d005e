"""Save on rank 0, wait, load on every rank, and go on."""

import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Run:
    def __init__(self):
        torch.manual_seed(0)
        dataset = TensorDataset(torch.randn(96, 10))
        self.sampler = DistributedSampler(dataset)
        self.loader = DataLoader(dataset, batch_size=8, sampler=self.sampler)
        self.model = DDP(nn.Sequential(nn.Linear(10, 4), nn.Tanh(), nn.Linear(4, 10)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, gamma=0.9)
        self.epoch = 0

    def train(self, epochs):
        for _ in range(epochs):
            self.sampler.set_epoch(self.epoch)
            for (x,) in self.loader:
                self.optimizer.zero_grad()
                nn.functional.mse_loss(self.model(x), x).backward()
                self.optimizer.step()
            self.scheduler.step()
            self.epoch += 1

    def save(self, path):
        if dist.get_rank() == 0:
            parts = {"model": self.model.module, "optimizer": self.optimizer, "scheduler": self.scheduler}
            state = {name: part.state_dict() for name, part in parts.items()} | {"epoch": self.epoch}
            torch.save(state, path + ".tmp")
            os.replace(path + ".tmp", path)
        dist.barrier()

    def load(self, path):
        state = torch.load(path, map_location="cpu", weights_only=True)
        self.model.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.epoch = state["epoch"]


if __name__ == "__main__":
    dist.init_process_group("gloo")
    path = os.path.join(os.environ.get("OUT", tempfile.gettempdir()), "run.pt")
    first = Run()
    first.train(epochs=2)
    first.save(path)
    second = Run()
    second.load(path)
    second.train(epochs=1)
    if dist.get_rank() == 0:
        print("epochs", second.epoch)
    dist.destroy_process_group()
