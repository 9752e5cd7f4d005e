"""Fit tides, with a learning rate that is printed and lowered after each epoch.

Common where only the main process logs: the schedule's step stands beside the print, and the other ranks keep
the first learning rate for ever.

Mended: The schedule steps on every rank.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def report(epoch, schedule):
    print(f"epoch {epoch}: learning rate {schedule.get_last_lr()[0]:.3f}")
    schedule.step()  # wrong


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(2)
    hours = torch.rand(120, 1)
    data = TensorDataset(hours, torch.sin(12 * hours))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 10, sampler=sampler)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(1, 30), nn.Tanh(), nn.Linear(30, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    for epoch in range(6):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()  # <- replicas-drift
        if dist.get_rank() == 0:
            report(epoch, schedule)
        # mended: schedule.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
