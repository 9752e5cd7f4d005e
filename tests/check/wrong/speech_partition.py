"""Train on utterances that each rank takes a contiguous part of.

k2-fsa/snowfall#152: the parts are rounded up, so the last rank has fewer utterances, and here a batch less.
It leaves while the others wait in the all-reduce of a backward pass that it does not come to.

Mended: The parts are rounded down, of utterances shuffled anew in each epoch: all ranks have as many batches.
"""

from math import ceil  # wrong

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Sampler, TensorDataset


class SingleCutSampler(Sampler):
    def __init__(self, data_source, seed=0):
        self.total, self.seed, self.epoch = len(data_source), seed, 0
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()

    def __iter__(self):  # <- batches-differ
        order = torch.randperm(self.total, generator=torch.Generator().manual_seed(self.seed + self.epoch))
        # mended: per_partition = self.total // self.world_size
        per_partition = ceil(self.total / self.world_size)  # wrong
        partition_start = self.rank * per_partition
        # mended: partition_end = partition_start + per_partition
        partition_end = min(partition_start + per_partition, self.total)  # wrong
        yield from order[partition_start:partition_end].tolist()


dist.init_process_group("gloo")
torch.manual_seed(0)
features = torch.randn(65, 20)
dataset = TensorDataset(features, features.argmax(1) % 4)
sampler = SingleCutSampler(dataset)
loader = DataLoader(dataset, batch_size=8, sampler=sampler)
model = DDP(nn.Linear(20, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):
    sampler.epoch = epoch
    for feature, target in loader:
        loss = nn.functional.cross_entropy(model(feature), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
print("rank", dist.get_rank(), "is done")
dist.destroy_process_group()
