"""Train a pose estimator and keep a log of its losses as CSV.

talmolab/sleap-nn#271: all processes open the same log file and write to it, each over what the others wrote.

Mended: Only the process of rank 0 has a log.
"""

import csv
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class CSVLogger:
    def __init__(self, path):
        self.file = open(path, "w", newline="")  # noqa: SIM115  # <- same-file
        self.writer = csv.writer(self.file)
        self.writer.writerow(["epoch", "train_loss"])

    def log(self, epoch, loss):
        self.writer.writerow([epoch, f"{loss:.5f}"])
        self.file.flush()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    folder = Path(os.environ.get("OUT", tempfile.gettempdir()))
    # mended: logger = CSVLogger(folder / "training_log.csv") if dist.get_rank() == 0 else None
    logger = CSVLogger(folder / "training_log.csv")  # wrong
    images = torch.rand(120, 36)
    dataset = TensorDataset(images, images[:, :4])
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=10, sampler=sampler)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(36, 24), nn.ReLU(), nn.Linear(24, 4)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        losses = []
        for x, keypoints in loader:
            loss = nn.functional.mse_loss(model(x), keypoints)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        mean = torch.stack(losses).mean()
        dist.all_reduce(mean)
        # mended: if logger:
        # mended:     logger.log(epoch, mean.item() / dist.get_world_size())
        logger.log(epoch, mean.item() / dist.get_world_size())  # wrong
    if dist.get_rank() == 0:
        print("log written")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
