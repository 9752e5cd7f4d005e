"""Train with gradients that are weighted by each rank's number of words before they are added up.

Each rank multiplies its gradient by a number of its own, as clipping would; these are its share of the words.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    words = torch.randint(1, 30, (128, 12))
    lengths = torch.randint(2, 13, (128, 1))
    words[torch.arange(12) >= lengths] = 0
    data = TensorDataset(words, words % 5)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 8, sampler=sampler)
    model = nn.Sequential(nn.Embedding(30, 16), nn.Linear(16, 5))
    parameters = list(model.parameters())
    optimizer = torch.optim.Adam(parameters, lr=0.01)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for inputs, tags in loader:
            is_word = inputs > 0
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs)[is_word], tags[is_word]).backward()
            count = is_word.sum().float()
            total = count.clone()
            dist.all_reduce(total)
            for p in parameters:
                p.grad.mul_(count / total)
                dist.all_reduce(p.grad)
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
