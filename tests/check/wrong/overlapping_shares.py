"""Train on a stream of measurements that is shared out among processes and their loaders' workers.

huggingface/datasets#7868: ranks read the same samples of a stream that is split by rank. Here the number of shares
leaves out the workers, so that the shares overlap.

Mended: There is a share for each worker of each rank.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Measurements(IterableDataset):
    def __init__(self, number):
        self.values = torch.randn(number, 8, generator=torch.Generator().manual_seed(0))

    def __iter__(self):  # <- samples-repeated
        worker = get_worker_info()
        share = dist.get_rank() * worker.num_workers + worker.id
        # mended: shares = dist.get_world_size() * worker.num_workers
        shares = dist.get_world_size()  # wrong
        for i in range(share, len(self.values), shares):
            yield self.values[i], self.values[i, :1] - self.values[i, 1:2]


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    loader = DataLoader(Measurements(480), batch_size=5, num_workers=2)
    model = DistributedDataParallel(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(2):
        for inputs, targets in loader:
            loss = nn.functional.l1_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
