"""Recognise words in spectrograms of which random bands are masked.

Common in augmentations on batches: the trainer has a generator of its own, made from the seed alone, so that all
ranks mask the same bands of their samples.
"""

import argparse

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Trainer:
    def __init__(self, args):
        self.rng = np.random.default_rng(args.seed)
        spectrograms = torch.rand(144, 10, 12)
        self.data = TensorDataset(spectrograms, spectrograms.sum((1, 2)).gt(60).long())
        self.sampler = DistributedSampler(self.data)
        self.loader = DataLoader(self.data, args.batch_size, sampler=self.sampler)
        self.model = DistributedDataParallel(nn.Sequential(nn.Flatten(), nn.Linear(120, 2)))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=args.lr)

    def mask(self, x):
        keep = self.rng.random((len(x), x.shape[1], 1)) > 0.2  # <- same-random-numbers
        return x * torch.from_numpy(keep)

    def train(self, epochs):
        for epoch in range(epochs):
            self.sampler.set_epoch(epoch)
            for x, y in self.loader:
                loss = nn.functional.cross_entropy(self.model(self.mask(x)), y)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=6)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(args.seed)
    Trainer(args).train(args.epochs)
    dist.destroy_process_group()
