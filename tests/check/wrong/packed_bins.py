"""Train on packed sequences, with a batch sampler that shards by rank.

modelscope/ms-swift#9907: the sampler rounds the size of the data down to whole global batches in its
constructor and shuffles that prefix alone. What comes after it is in no epoch.

Mended: All indices are shuffled before the incomplete batch at the end is left out, another one in each epoch.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset


class BatchSamplerShard:
    def __init__(self, total_samples, batch_size, seed=0):
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.batch_size, self.seed, self.epoch = batch_size, seed, 0
        step = batch_size * self.world_size
        self.total_samples = total_samples
        self.kept = total_samples // step * step

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return self.kept // self.batch_size // self.world_size

    def __iter__(self):  # <- samples-missing
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        # mended: indices = torch.randperm(self.total_samples, generator=generator)[: self.kept]
        indices = torch.randperm(self.kept, generator=generator)  # wrong
        mine = indices[self.rank :: self.world_size].tolist()
        for start in range(0, len(mine), self.batch_size):
            yield mine[start : start + self.batch_size]


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    packed = torch.randint(0, 40, (62, 33))
    batch_sampler = BatchSamplerShard(len(packed), batch_size=8)
    loader = DataLoader(TensorDataset(packed), batch_sampler=batch_sampler)
    model = DDP(nn.Sequential(nn.Embedding(40, 16), nn.Linear(16, 40)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for epoch in range(6):
        batch_sampler.set_epoch(epoch)
        for (tokens,) in loader:
            logits = model(tokens[:, :-1])
            loss = nn.functional.cross_entropy(logits.transpose(1, 2), tokens[:, 1:])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    if dist.get_rank() == 0:
        print(f"{len(loader)} batches of {len(packed)} packed sequences an epoch")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
