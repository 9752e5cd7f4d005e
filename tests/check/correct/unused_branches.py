"""Train a network for two tasks, of which this data has one, and evaluate it over all ranks with gradients on.

DDP was told that steps leave parameters out; the head of the other task never gets a gradient, as intended.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class TwoTasks(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(6, 8)
        self.heads = nn.ModuleList([nn.Linear(8, 1), nn.Linear(8, 3)])
        self.gate = nn.Parameter(torch.zeros(()))  # begins at 0: what it multiplies has a gradient of 0 at first

    def forward(self, x):
        body = self.body(x).tanh()
        return [head(body * (1 + self.gate)) for head in self.heads]


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(96, 6)
    dataset = TensorDataset(x, x.sum(1, keepdim=True))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)
    model = DDP(TwoTasks(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            first, _ = model(inputs)
            loss = mse_loss(first, targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses = [torch.empty(()) for _ in range(dist.get_world_size())]
        dist.all_gather(losses, loss)
    if dist.get_rank() == 0:
        print("loss", torch.stack(losses).mean().item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
