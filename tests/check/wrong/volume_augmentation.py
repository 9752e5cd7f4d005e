"""Segment small volumes, augmented by workers.

wolny/pytorch-3dunet#32: the augmentation draws from a RandomState that is seeded when the dataset is made.
Every worker of every rank has a copy of it, and all copies give the same numbers.

Mended: Each worker seeds the augmentation from torch's seed, which differs between ranks, workers and epochs.
"""

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

# mended: from torch.utils.data import get_worker_info


class RandomContrast:
    def __init__(self, random_state, alpha=(0.5, 1.5)):
        self.random_state = random_state
        self.alpha = alpha

    def __call__(self, m):
        shift = self.random_state.uniform(-0.5, 0.5)  # <- same-random-numbers
        return m * self.random_state.uniform(*self.alpha) + shift


# mended: def seed_augmentation(worker_id):
# mended:     transform = get_worker_info().dataset.transform
# mended:     transform.random_state = np.random.RandomState(torch.initial_seed() % 2**32)


class Volumes(Dataset):
    def __init__(self, n=96):
        rng = np.random.RandomState(0)
        self.raw = rng.rand(n, 1, 4, 4, 4).astype(np.float32)
        self.transform = RandomContrast(np.random.RandomState(47))

    def __len__(self):
        return len(self.raw)

    def __getitem__(self, i):
        return torch.from_numpy(self.transform(self.raw[i])).float(), torch.from_numpy(self.raw[i] > 0.5).float()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Conv3d(1, 1, 3, padding=1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    volumes = Volumes()
    sampler = DistributedSampler(volumes)
    torch.manual_seed(1 + dist.get_rank())
    # mended: seeding = {"worker_init_fn": seed_augmentation}
    # mended: loader = DataLoader(volumes, batch_size=8, sampler=sampler, num_workers=2, **seeding)
    loader = DataLoader(volumes, batch_size=8, sampler=sampler, num_workers=2)  # wrong
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for raw, mask in loader:
            loss = nn.functional.binary_cross_entropy_with_logits(model(raw), mask)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    if dist.get_rank() == 0:
        print("bias", model.module.bias.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
