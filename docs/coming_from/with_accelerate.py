"""Learn which points lie in a circle."""

import os

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def make_data(n: int) -> TensorDataset:
    points = torch.randn(n, 2)
    return TensorDataset(points, (points.norm(dim=1, keepdim=True) < 1).float())


def main(epochs: int = 5) -> None:
    accelerator = Accelerator()

    torch.manual_seed(0)
    train_set, test_set = make_data(6000), make_data(1200)
    batch_size = 60 // accelerator.num_processes
    train_loader = DataLoader(train_set, batch_size, shuffle=True)
    test_loader = DataLoader(test_set, batch_size=100)

    model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    prepared = accelerator.prepare(model, optimizer, train_loader, test_loader)
    model, optimizer, train_loader, test_loader = prepared

    start = 0
    while os.path.exists(f"checkpoints/epoch_{start}"):
        start += 1
    if start > 0:
        accelerator.load_state(f"checkpoints/epoch_{start - 1}")

    for epoch in range(start, epochs):
        total = torch.zeros((), device=accelerator.device)
        for x, y in train_loader:
            loss = nn.functional.binary_cross_entropy_with_logits(model(x), y)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            total += loss.detach() * len(x)

        right = torch.zeros((), device=accelerator.device)
        with torch.no_grad():
            for x, y in test_loader:
                logits, targets = accelerator.gather_for_metrics((model(x), y))
                right += ((logits > 0) == targets).sum()

        loss = accelerator.reduce(total, "sum").item() / len(train_set)
        accuracy = right.item() / len(test_set)
        accelerator.print(
            f"epoch {epoch}: loss {loss:.4f}, accuracy {accuracy:.4f}", flush=True
        )
        accelerator.save_state(f"checkpoints/epoch_{epoch}")


if __name__ == "__main__":
    main()
