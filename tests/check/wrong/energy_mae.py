"""Predict energies of molecules, and evaluate the mean absolute error.

facebookresearch/fairchem#269: the error is averaged per rank and these means are averaged, though the ranks
have different numbers of systems.

Mended: Errors and numbers of systems are summed over the ranks, and divided then.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


# mended: def all_reduce(value):
def all_reduce(value, average=False):  # wrong
    tensor = torch.as_tensor(value, dtype=torch.float64)
    dist.all_reduce(tensor)
    # mended: return tensor.item()
    return (tensor / dist.get_world_size()).item() if average else tensor.item()  # wrong


@torch.no_grad()
def validate(model, loader):
    model.eval()
    total, systems = 0.0, 0
    for x, energy in loader:
        total += (model(x).squeeze(1) - energy).abs().sum().item()
        systems += len(energy)
    model.train()
    # mended: return all_reduce(total) / all_reduce(systems)
    return all_reduce(total / systems, average=True)  # wrong <- mean-of-means


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    x = torch.randn(120 + 31, 8)
    dataset = TensorDataset(x, x.square().sum(1))
    train_set = Subset(dataset, range(120))
    val_set = Subset(dataset, range(120 + rank, 151, world_size))
    sampler = DistributedSampler(train_set)
    train_loader = DataLoader(train_set, batch_size=10, sampler=sampler)
    val_loader = DataLoader(val_set, batch_size=8)

    model = DDP(nn.Sequential(nn.Linear(8, 64), nn.SiLU(), nn.Linear(64, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, energy in train_loader:
            loss = nn.functional.l1_loss(model(inputs).squeeze(1), energy)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        mae = validate(model.module, val_loader)
        if rank == 0:
            print(f"epoch {epoch}: mae {mae:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
