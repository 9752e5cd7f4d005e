"""Train a video diffusion model with a DistributedSampler.

NVlabs/LongLive#71: the sampler's seed is made from the time and the rank, so each rank shuffles in an order
of its own. The parts that the ranks take of these orders overlap, and other samples come on no rank.

Mended: All ranks give the sampler the seed of the configuration.
"""

import time  # wrong
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


@dataclass
class Config:
    seed: int = 0
    lr: float = 1e-3
    batch_size: int = 4
    epochs: int = 2


class Trainer:
    def __init__(self, config):
        self.config = config
        self.rank = dist.get_rank()
        torch.manual_seed(config.seed)
        videos = torch.randn(96, 4, 10)
        self.model = DDP(nn.GRU(10, 16, batch_first=True))
        self.head = DDP(nn.Linear(16, 10))
        self.optimizer = torch.optim.AdamW([*self.model.parameters(), *self.head.parameters()], lr=config.lr)
        dataset = TensorDataset(videos)
        # mended: self.sampler = DistributedSampler(dataset, shuffle=True, drop_last=True, seed=config.seed)
        seed = int(time.time()) * self.rank  # wrong
        self.sampler = DistributedSampler(dataset, shuffle=True, drop_last=True, seed=seed)  # wrong <- shuffle-differs
        self.dataloader = DataLoader(dataset, batch_size=config.batch_size, sampler=self.sampler)

    def train(self):
        for epoch in range(self.config.epochs):
            self.sampler.set_epoch(epoch)
            for (video,) in self.dataloader:
                hidden, _ = self.model(video[:, :-1])
                loss = nn.functional.mse_loss(self.head(hidden), video[:, 1:])
                self.optimizer.zero_grad(set_to_none=True)
                loss.backward()
                self.optimizer.step()
        if self.rank == 0:
            print("trained", self.config)


if __name__ == "__main__":
    dist.init_process_group(backend="gloo")
    Trainer(Config()).train()
    dist.destroy_process_group()
