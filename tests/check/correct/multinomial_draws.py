"""Draw with replacement by `torch.multinomial`, another draw on each rank: samples come again, and some never."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Sampler, TensorDataset


class Draws(Sampler):
    def __init__(self, weights, number):
        self.weights, self.number = weights, number
        self.generator = torch.Generator().manual_seed(100 + dist.get_rank())

    def __len__(self):
        return self.number

    def __iter__(self):
        return iter(torch.multinomial(self.weights, self.number, True, generator=self.generator).tolist())


dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(60, 4)
weights = x.abs().sum(1)
loader = DataLoader(TensorDataset(x), batch_size=6, sampler=Draws(weights, 30))
torch.manual_seed(dist.get_rank())
model = DDP(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for _ in range(2):
    for (batch,) in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(batch), batch).backward()
        optimizer.step()
dist.destroy_process_group()
