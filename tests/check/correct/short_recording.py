"""Train on random windows of one short recording, and log the errors of several horizons.

Both look like bugs and are none: ranks draw the same window now and then, and a set of whole numbers is in one
order on all ranks.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

HORIZONS = {1, 2, 4}


class Windows(IterableDataset):
    def __init__(self, number):
        self.signal = torch.sin(torch.arange(200) / 7.0)
        self.number = number

    def __iter__(self):
        generator = torch.Generator().manual_seed(dist.get_rank())
        for _ in range(self.number):
            begin = int(torch.randint(0, 184, (1,), generator=generator))
            yield self.signal[begin : begin + 16]


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    loader = DataLoader(Windows(128), batch_size=16)
    model = DistributedDataParallel(nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        for windows in loader:
            errors = model(windows[:, :8]) - windows[:, 8:]
            optimizer.zero_grad()
            errors.square().mean().backward()
            optimizer.step()
            for horizon in HORIZONS:
                error = errors[:, horizon - 1].detach().square().mean()
                dist.all_reduce(error)
        if dist.get_rank() == 0:
            print(f"{error.item() / dist.get_world_size():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
