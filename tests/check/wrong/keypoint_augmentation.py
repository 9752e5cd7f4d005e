"""Train a keypoint detector on images that workers shift at random.

xingyizhou/CenterNet#233: NumPy's seeds are the same where they should differ. Here the seed is the worker's
number, so worker 1 draws the same shifts on each rank, and again in each epoch.

Mended: A worker's seed comes from torch's, which differs between ranks, workers and epochs.
"""

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Keypoints(Dataset):
    def __init__(self, n):
        rng = np.random.RandomState(0)
        self.images = rng.rand(n, 12, 12).astype(np.float32)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        dy, dx = np.random.randint(0, 5, size=2)
        crop = self.images[index, dy : dy + 8, dx : dx + 8]
        peak = np.unravel_index(crop.argmax(), crop.shape)
        return torch.from_numpy(crop.copy()), torch.tensor(peak, dtype=torch.float32) / 8


def worker_init_fn(worker_id):
    # mended: np.random.seed(torch.initial_seed() % 2**32)
    np.random.seed(worker_id)  # wrong <- same-random-numbers


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(317)
    dataset = Keypoints(96)
    sampler = DistributedSampler(dataset, seed=317)
    model = DDP(nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1.25e-3)
    torch.manual_seed(317 + 1 + dist.get_rank())
    loader = DataLoader(dataset, batch_size=8, sampler=sampler, num_workers=2, worker_init_fn=worker_init_fn)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for image, peak in loader:
            loss = nn.functional.l1_loss(model(image), peak)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    if dist.get_rank() == 0:
        print("trained")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
