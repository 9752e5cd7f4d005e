"""Stop early: rank 0 evaluates and decides, and tells the others."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class EarlyStopping:
    def __init__(self, patience=0):
        self.patience, self.best, self.waited = patience, float("inf"), 0

    def __call__(self, loss):
        if loss < self.best - 1e-4:
            self.best, self.waited = loss, 0
        else:
            self.waited += 1
        return self.waited > self.patience


def main(max_epochs=8):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    x = torch.randn(96 + 32, 12)
    y = x[:, :1] + 0.5 * torch.randn(len(x), 1)
    train = TensorDataset(x[:96], y[:96])
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=8, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-2)
    stopper = EarlyStopping()
    stop = torch.zeros(1, dtype=torch.int64)
    for epoch in range(max_epochs):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
        if rank == 0:
            with torch.no_grad():
                validation = nn.functional.mse_loss(model.module(x[96:]), y[96:]).item()
            stop.fill_(stopper(validation))
        dist.broadcast(stop, src=0)
        if stop.item():
            break
    if rank == 0:
        print(f"stopped after epoch {epoch}, best {stopper.best:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
