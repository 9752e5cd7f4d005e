"""Train on a stream that is split by rank, read by two workers of each rank.

huggingface/datasets#3423: every worker has a copy of the dataset and reads all of it. The stream is split by
rank but not by worker, so each sample comes twice.

Mended: The stream is split by rank and worker.
"""

import json
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

# mended: from torch.utils.data import get_worker_info


class JsonLines(IterableDataset):
    def __init__(self, lines):
        self.lines = lines
        self.rank = int(os.environ.get("RANK", 0))
        self.world_size = int(os.environ.get("WORLD_SIZE", 1))

    def __iter__(self):  # <- samples-repeated
        # mended: info = get_worker_info()
        # mended: first = self.rank * info.num_workers + info.id
        # mended: for line in self.lines[first :: self.world_size * info.num_workers]:
        for line in self.lines[self.rank :: self.world_size]:  # wrong
            record = json.loads(line)
            yield torch.tensor(record["x"]), torch.tensor(record["y"])


def make_lines(n=96):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(n, 6, generator=g)
    return [json.dumps({"x": row.tolist(), "y": row.sum().item()}) for row in x]


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    loader = DataLoader(JsonLines(make_lines()), batch_size=8, num_workers=2)
    model = DistributedDataParallel(nn.Linear(6, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x).squeeze(1), y).backward()
            optimizer.step()
    if dist.get_rank() == 0:
        print("weight", [round(w, 2) for w in model.module.weight[0].tolist()])
    dist.destroy_process_group()
