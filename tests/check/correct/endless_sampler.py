"""A trainer with private settings, and a sampler that goes through the dataset again and again, in other orders."""

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, Sampler, TensorDataset


class EndlessSampler(Sampler):
    def __init__(self, size):
        self.size = size

    def __iter__(self):
        generator = torch.Generator().manual_seed(0)
        while True:
            order = torch.randperm(self.size, generator=generator)
            yield from order[dist.get_rank() :: dist.get_world_size()].tolist()


class Trainer:
    def __init__(self, model, epochs, steps):
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.schedule = CosineAnnealingLR(self.optimizer, T_max=epochs * steps)
        self.__epochs = epochs
        self.__steps = steps

    def fit(self, loader):
        for _ in range(self.__epochs):
            for number, batch in enumerate(loader, 1):
                self.step(*batch)
                if number == self.__steps:
                    break

    def step(self, inputs, targets):
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.model(inputs), targets).backward()
        self.optimizer.step()
        self.schedule.step()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(96, 6)
    dataset = TensorDataset(x, x[:, :3].argmax(1))
    loader = DataLoader(dataset, batch_size=8, sampler=EndlessSampler(len(dataset)))
    Trainer(DistributedDataParallel(nn.Linear(6, 3)), epochs=4, steps=10).fit(loader)
    dist.destroy_process_group()
