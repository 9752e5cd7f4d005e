"""Learn which points lie in a circle."""

import argparse
import os

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from utils_dist import get_dist_info, init_dist, master_only, reduce_sum


def make_data(n: int) -> TensorDataset:
    points = torch.randn(n, 2)
    return TensorDataset(points, (points.norm(dim=1, keepdim=True) < 1).float())


@master_only
def report(text: str) -> None:
    print(text, flush=True)


@master_only
def save(state: dict) -> None:
    torch.save(state, "checkpoint.pt")


def main(epochs: int = 5) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dist", action="store_true")
    parser.add_argument("--launcher", default="pytorch")
    opt = vars(parser.parse_args())
    if opt["dist"]:
        init_dist(opt["launcher"])
    opt["rank"], opt["world_size"] = get_dist_info()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    torch.manual_seed(0)
    train_set, test_set = make_data(6000), make_data(1200)
    if opt["dist"]:
        train_sampler = DistributedSampler(train_set, drop_last=True)
        batch_size = 60 // opt["world_size"]
        train_loader = DataLoader(train_set, batch_size, sampler=train_sampler)
    else:
        train_loader = DataLoader(train_set, batch_size=60, shuffle=True)
    test_loader = DataLoader(test_set, batch_size=100)

    model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 1)).to(device)
    if opt["dist"]:
        device_ids = [torch.cuda.current_device()] if device.type == "cuda" else None
        model = DistributedDataParallel(model, device_ids=device_ids)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    start = 0
    if os.path.exists("checkpoint.pt"):
        saved = torch.load("checkpoint.pt", map_location=device)
        (model.module if opt["dist"] else model).load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        start = saved["epoch"] + 1

    for epoch in range(start, epochs):
        if opt["dist"]:
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
        if opt["rank"] == 0:
            bare = model.module if opt["dist"] else model
            with torch.no_grad():
                for x, y in test_loader:
                    x, y = x.to(device), y.to(device)
                    right += ((bare(x) > 0) == y).sum()

        loss = reduce_sum(total).item() / len(train_set)
        accuracy = right.item() / len(test_set)
        report(f"epoch {epoch}: loss {loss:.4f}, accuracy {accuracy:.4f}")
        weights = (model.module if opt["dist"] else model).state_dict()
        save({"model": weights, "optimizer": optimizer.state_dict(), "epoch": epoch})


if __name__ == "__main__":
    main()
