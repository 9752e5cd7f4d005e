"""Train a compiled model in DDP."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(96, 8)
    dataset = TensorDataset(x, x.abs().sum(1, keepdim=True))
    sampler = DistributedSampler(dataset, drop_last=True)
    loader = DataLoader(dataset, batch_size=12, sampler=sampler, drop_last=True)
    model = DDP(nn.Sequential(nn.Linear(8, 32), nn.SiLU(), nn.Linear(32, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    compiled = torch.compile(model, backend="aot_eager")
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            loss = nn.functional.mse_loss(compiled(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    if dist.get_rank() == 0:
        print("compiled and trained")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
