"""Augment images in workers.

PyTorch's documentation warns of it: each epoch starts new workers, which seed NumPy with the same numbers again.

Mended: They seed it with torch's number, which differs in each epoch.
"""

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Signals(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        noise = np.random.randn(6).astype(np.float32)  # <- random-numbers-repeat
        return torch.full((6,), index / 64) + torch.from_numpy(noise), index % 3


def seed_worker(number):
    # mended: np.random.seed(torch.initial_seed() % 2**32)
    np.random.seed(100 + number)  # wrong <- random-numbers-repeat


torch.manual_seed(0)
loader = DataLoader(Signals(), batch_size=8, shuffle=True, num_workers=2, worker_init_fn=seed_worker)
model = nn.Linear(6, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
