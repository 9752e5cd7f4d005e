"""Train on a stream of readings that is shared out among processes and their loaders' workers.

Common in streams that are split by hand: the share of a worker is divided by the number of workers once more, so that
an epoch has half of the readings.

Mended: Each worker of each rank reads a run of its own, and these make up the whole.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class SensorLog(IterableDataset):
    def __init__(self, number):
        self.values = torch.randn(number, 5, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.values)

    def __iter__(self):  # <- samples-missing
        worker = get_worker_info()
        share = len(self) // dist.get_world_size() // worker.num_workers
        start = (dist.get_rank() * worker.num_workers + worker.id) * share
        # mended: for i in range(start, start + share):
        for i in range(start, start + share // worker.num_workers):  # wrong
            yield self.values[i], self.values[i].amax(0, keepdim=True)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    loader = DataLoader(SensorLog(120), batch_size=15, num_workers=2)
    model = DistributedDataParallel(nn.Linear(5, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for _ in range(2):
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
    if dist.get_rank() == 0:
        print("bias", model.module.bias.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
