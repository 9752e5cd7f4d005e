"""Learn which points lie in a circle."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def make_data(n: int) -> TensorDataset:
    points = torch.randn(n, 2)
    return TensorDataset(points, (points.norm(dim=1, keepdim=True) < 1).float())


def main(epochs: int = 5) -> None:
    distributed = "WORLD_SIZE" in os.environ
    rank = int(os.environ.get("RANK", 0))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    if distributed:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")

    torch.manual_seed(0)
    train_set, test_set = make_data(6000), make_data(1200)
    train_sampler = DistributedSampler(train_set, world_size, rank)
    train_loader = DataLoader(
        train_set, batch_size=60 // world_size, sampler=train_sampler
    )
    test_sampler = DistributedSampler(test_set, world_size, rank, shuffle=False)
    test_loader = DataLoader(test_set, batch_size=100, sampler=test_sampler)

    model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 1)).to(device)
    if distributed:
        device_ids = [local_rank] if device.type == "cuda" else None
        model = DistributedDataParallel(model, device_ids=device_ids)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    start = 0
    if os.path.exists("checkpoint.pt"):
        saved = torch.load("checkpoint.pt", map_location=device)
        (model.module if distributed else model).load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        start = saved["epoch"] + 1

    for epoch in range(start, epochs):
        train_sampler.set_epoch(epoch)
        total = torch.zeros((), device=device)
        for x, y in train_loader:
            x, y = x.to(device), y.to(device)
            loss = nn.functional.binary_cross_entropy_with_logits(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach() * len(x)

        right = torch.zeros((), device=device)
        with torch.no_grad():
            for x, y in test_loader:
                x, y = x.to(device), y.to(device)
                right += ((model(x) > 0) == y).sum()

        if distributed:
            dist.all_reduce(total)
            dist.all_reduce(right)
        loss, accuracy = total.item() / len(train_set), right.item() / len(test_set)
        if rank == 0:
            print(
                f"epoch {epoch}: loss {loss:.4f}, accuracy {accuracy:.4f}", flush=True
            )
            weights = (model.module if distributed else model).state_dict()
            state = {
                "model": weights,
                "optimizer": optimizer.state_dict(),
                "epoch": epoch,
            }
            torch.save(state, "checkpoint.pt")


if __name__ == "__main__":
    main()
