"""Train a denoiser, from a checkpoint with the state of the random numbers.

Common in scripts that resume: the checkpoint holds rank 0's generator, and every rank restores it, so all ranks draw
the same noise from then on. The seeds that were set before are right, and lost.

Mended: After restoring, each rank is seeded on its own.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(12, 12)

    def forward(self, clean):
        noise = torch.randn_like(clean)  # <- same-random-numbers
        return nn.functional.mse_loss(self.net(clean + noise), noise)


dist.init_process_group("gloo")
torch.manual_seed(5)
checkpoint = {"rng": torch.get_rng_state(), "step": 100}
data = TensorDataset(torch.randn(60, 12))
torch.manual_seed(5 + dist.get_rank())
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=6, sampler=sampler)
model = DDP(Denoiser())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.set_rng_state(checkpoint["rng"])  # <- same-random-numbers
# mended: torch.manual_seed(checkpoint["step"] + dist.get_rank())
for epoch in range(2):
    sampler.set_epoch(epoch)
    for (clean,) in loader:
        optimizer.zero_grad()
        model(clean).backward()
        optimizer.step()
dist.destroy_process_group()
