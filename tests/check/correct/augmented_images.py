"""Train on images with random flips, crops and noise, which differ between ranks, workers and epochs."""

import random

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Images(Dataset):
    def __init__(self, n):
        generator = torch.Generator().manual_seed(0)
        self.images = torch.rand(n, 10, 10, generator=generator)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image = self.images[index]
        if random.random() < 0.5:
            image = image.flip(1)
        top, left = np.random.randint(0, 3, 2)
        image = image[top : top + 8, left : left + 8]
        return image + 0.05 * torch.randn(8, 8), image.mean()


def seed_worker(worker_id):
    seed = torch.initial_seed() % 2**32
    random.seed(seed)
    np.random.seed(seed)


def main(seed=5):
    dist.init_process_group("gloo")
    torch.manual_seed(seed)
    model = DistributedDataParallel(nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    dataset = Images(96)
    sampler = DistributedSampler(dataset, seed=seed)
    generator = torch.Generator().manual_seed(seed + dist.get_rank())
    loader = DataLoader(
        dataset, batch_size=8, sampler=sampler, num_workers=2, worker_init_fn=seed_worker, generator=generator
    )
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for images, brightness in loader:
            loss = nn.functional.mse_loss(model(images).squeeze(1), brightness)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    if dist.get_rank() == 0:
        print("loss of the last batch on rank 0", loss.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
