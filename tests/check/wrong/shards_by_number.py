"""Train on a stream of shards that `ddpkit.make_loader` spreads over ranks and their workers.

Common in `shard()` methods: the number of shards of a part is rounded down, so that the last shards belong to no part.

Mended: Each shard belongs to a part, and there are as many as divide by the number of parts.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import IterableDataset

import ddpkit


class Shards(IterableDataset):
    def __init__(self, seeds):
        self.seeds = seeds
        self.num_shards = len(seeds)

    def __len__(self):
        return 8 * len(self.seeds)

    def shard(self, index, num_shards):  # <- samples-missing
        # mended: return Shards(self.seeds[index::num_shards])
        size = self.num_shards // num_shards  # wrong
        return Shards(self.seeds[index * size : (index + 1) * size])  # wrong

    def __iter__(self):
        for seed in self.seeds:
            for x in torch.randn(8, 4, generator=torch.Generator().manual_seed(seed)):
                yield x, x.sum(0, keepdim=True)


def main():
    ddpkit.setup()
    torch.manual_seed(0)
    # mended: loader = ddpkit.make_loader(Shards(list(range(8))), 8, num_workers=2)
    loader = ddpkit.make_loader(Shards(list(range(6))), 8, num_workers=2)  # wrong
    model = DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in loader.epochs(2):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    if dist.get_rank() == 0:
        print("weight", model.module.weight[0].tolist())
    ddpkit.teardown()


if __name__ == "__main__":
    main()
