"""Train a bigram language model on a stream of documents.

huggingface/datasets#5360: an iterable dataset is not split by rank. Every rank reads all of it, in the same
order.

Mended: Each rank reads every world-size-th document.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset


class Documents(IterableDataset):
    def __init__(self, n_documents, seed):
        self.n_documents = n_documents
        self.seed = seed
        self.epoch = 0

    def read(self, i):
        g = torch.Generator().manual_seed(self.seed + i)
        return torch.randint(0, 64, (17,), generator=g)

    def __iter__(self):  # <- same-samples
        order = torch.randperm(self.n_documents, generator=torch.Generator().manual_seed(self.epoch))
        # mended: for i in order[dist.get_rank() :: dist.get_world_size()].tolist():
        for i in order.tolist():  # wrong
            tokens = self.read(i)
            yield tokens[:-1], tokens[1:]


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    dataset = Documents(96, seed=1000)
    loader = DataLoader(dataset, batch_size=8)
    model = DistributedDataParallel(nn.Sequential(nn.Embedding(64, 24), nn.Linear(24, 64)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for epoch in range(2):
        dataset.epoch = epoch
        for x, y in loader:
            loss = F.cross_entropy(model(x).view(-1, 64), y.reshape(-1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    loss = loss.detach()
    dist.all_reduce(loss)
    if dist.get_rank() == 0:
        print(f"last loss {loss.item() / dist.get_world_size():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
