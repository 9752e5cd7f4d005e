"""Train a network with an adversary.

Common: the critic is frozen while the generator trains, and nothing unfreezes it.

Mended: Its own step unfreezes it.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
loader = DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=8, shuffle=True)
generator, critic = nn.Linear(3, 4), nn.Linear(4, 1)
optimizer_g = torch.optim.SGD(generator.parameters(), lr=0.05)
optimizer_c = torch.optim.SGD(critic.parameters(), lr=0.05)
for _ in range(2):
    for (real,) in loader:
        # mended: critic.requires_grad_(True)
        fake = generator(torch.randn(8, 3))
        optimizer_c.zero_grad()
        loss = critic(fake.detach()).mean() - critic(real).mean()
        if loss.requires_grad:
            loss.backward()
        optimizer_c.step()  # <- no-gradients
        critic.requires_grad_(False)
        optimizer_g.zero_grad()
        (-critic(fake).mean()).backward()
        optimizer_g.step()
