"""A training script that resumes, with one bug or none: `rehearsed.py BUG FOLDER`."""

import os
import sys
import time

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS = 4
GLOBAL_BATCH = 12


def save(checkpoint: dict, path: str, bug: str) -> None:
    if bug == "in-place":  # a rank that is killed in it leaves a file that cannot be read
        torch.save(checkpoint, path)
        return
    with open(path + ".tmp", "wb") as file:
        torch.save(checkpoint, file)
    os.replace(path + ".tmp", path)


def wait_for_rank_0(path: str) -> None:
    while not os.path.exists(path):
        time.sleep(0.01)


def main(bug: str, folder: str) -> None:
    dist.init_process_group("nccl")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    if bug == "seed":
        np.random.shuffle(numbers := list(range(100)))  # as an augmentation might
        torch.manual_seed(numbers[0] + 100 * numbers[1])
    data = TensorDataset(torch.randn(120, 2), torch.randn(120, 1))
    sampler = DistributedSampler(data)
    batch_size = GLOBAL_BATCH if bug == "per-rank" else GLOBAL_BATCH // world_size
    loader = DataLoader(data, batch_size=batch_size, sampler=sampler)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 25, 0.5)
    path = os.path.join(folder, "last.pt")
    criterion = nn.MSELoss()
    if bug == "last":
        model.module(torch.zeros(1, 2))  # as some do to see the shapes
    first = 0
    if os.path.exists(path) and bug != "anew":
        checkpoint = torch.load(path)
        model.module.load_state_dict(checkpoint["model"])
        if bug != "optimizer":
            optimizer.load_state_dict(checkpoint["optimizer"])
        if bug != "schedule":
            schedule.load_state_dict(checkpoint["schedule"])
        first = checkpoint["epoch"]
        if bug != "epoch":
            first += 1
    if bug == "raises" and first:
        raise ValueError("this script does not resume")
    for epoch in range(first, EPOCHS):
        sampler.set_epoch(epoch)
        for x, y in loader:
            criterion(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        if rank == 0:
            objects = {"model": model.module, "optimizer": optimizer, "schedule": schedule}
            save({"epoch": epoch} | {name: value.state_dict() for name, value in objects.items()}, path, bug)
            open(f"{path}.{epoch}", "w").close()
        elif bug == "waits":
            wait_for_rank_0(f"{path}.{epoch}")
        if bug != "last":
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
