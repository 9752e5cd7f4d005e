"""Train a tagger that looks at its mean accuracy now and then.

Common in loops that log at random steps: each rank asks its own random numbers whether it is time, and so one
rank averages a number while another is in the next step already.

Mended: All ranks draw the decision to log from equally seeded generators.
"""

import random

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def log_accuracy(scores, tags):
    accuracy = (scores.argmax(1) == tags).float().mean()
    dist.all_reduce(accuracy)  # <- collective-order
    if dist.get_rank() == 0:
        print(f"sum of accuracies {accuracy.item():.3f}")


def main():
    dist.init_process_group("gloo")
    # mended: chance = random.Random(100)
    chance = random.Random(100 + dist.get_rank())  # wrong
    torch.manual_seed(5)
    words = torch.randint(0, 40, (128, 6))
    data = TensorDataset(words, words[:, 0] % 4)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 8, sampler=sampler)
    model = DistributedDataParallel(nn.Sequential(nn.Embedding(40, 8), nn.Flatten(), nn.Linear(48, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for x, tags in loader:
            scores = model(x)
            optimizer.zero_grad()
            nn.functional.cross_entropy(scores, tags).backward()
            optimizer.step()
            if chance.random() < 0.3:  # <- collective-order
                log_accuracy(scores, tags)  # <- collective-order
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
