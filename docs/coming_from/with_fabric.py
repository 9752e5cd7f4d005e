"""Learn which points lie in a circle."""

import os

import torch
from lightning_fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def make_data(n: int) -> TensorDataset:
    points = torch.randn(n, 2)
    return TensorDataset(points, (points.norm(dim=1, keepdim=True) < 1).float())


def main(epochs: int = 5) -> None:
    fabric = Fabric()

    torch.manual_seed(0)
    train_set, test_set = make_data(6000), make_data(1200)
    train_loader = DataLoader(
        train_set, batch_size=60 // fabric.world_size, shuffle=True
    )
    test_loader = DataLoader(test_set, batch_size=100)
    train_loader, test_loader = fabric.setup_dataloaders(train_loader, test_loader)

    model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer = fabric.setup(model, optimizer)

    run = {"model": model, "optimizer": optimizer, "epoch": -1}
    if os.path.exists("checkpoint.ckpt"):
        fabric.load("checkpoint.ckpt", run)

    for epoch in range(run["epoch"] + 1, epochs):
        total = torch.zeros((), device=fabric.device)
        for x, y in train_loader:
            loss = nn.functional.binary_cross_entropy_with_logits(model(x), y)
            optimizer.zero_grad()
            fabric.backward(loss)
            optimizer.step()
            total += loss.detach() * len(x)

        right = torch.zeros((), device=fabric.device)
        with torch.no_grad():
            for x, y in test_loader:
                right += ((model(x) > 0) == y).sum()

        total, right = fabric.all_reduce((total, right), reduce_op="sum")
        loss, accuracy = total.item() / len(train_set), right.item() / len(test_set)
        fabric.print(
            f"epoch {epoch}: loss {loss:.4f}, accuracy {accuracy:.4f}", flush=True
        )
        run["epoch"] = epoch
        fabric.save("checkpoint.ckpt", run)


if __name__ == "__main__":
    main()
