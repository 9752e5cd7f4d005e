"""Go on with a training that was interrupted.

Common in scripts that resume: only rank 0 opens the checkpoint, DDP sends out the weights that it has read, and
nobody sends out the number of the epoch.

Mended: Rank 0 sends out the number of the epoch, too.
"""

import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main(path):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    points = torch.randn(128, 3)
    data = TensorDataset(points, points.norm(dim=1, keepdim=True))
    sampler = DistributedSampler(data)  # <- shuffle-differs
    loader = DataLoader(data, 16, sampler=sampler)
    model = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 1))
    done = 0
    if dist.get_rank() == 0:
        torch.save({"model": model.state_dict(), "epochs": 3}, path)
        checkpoint = torch.load(path)
        model.load_state_dict(checkpoint["model"])
        done = checkpoint["epochs"]
    # mended: numbers = [done]
    # mended: dist.broadcast_object_list(numbers, src=0)
    # mended: done = numbers[0]
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(done, 12):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(os.path.join(os.environ.get("OUT", "."), "interrupted.pt"))
