"""Learn which points lie in a circle."""

import os

import horovod.torch as hvd
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def make_data(n: int) -> TensorDataset:
    points = torch.randn(n, 2)
    return TensorDataset(points, (points.norm(dim=1, keepdim=True) < 1).float())


def main(epochs: int = 5) -> None:
    hvd.init()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", hvd.local_rank())
        torch.cuda.set_device(device)

    torch.manual_seed(0)
    train_set, test_set = make_data(6000), make_data(1200)
    train_sampler = DistributedSampler(train_set, hvd.size(), hvd.rank())
    train_loader = DataLoader(
        train_set, batch_size=60 // hvd.size(), sampler=train_sampler
    )
    test_sampler = DistributedSampler(test_set, hvd.size(), hvd.rank(), shuffle=False)
    test_loader = DataLoader(test_set, batch_size=100, sampler=test_sampler)

    model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    start = 0
    if os.path.exists("checkpoint.pt") and hvd.rank() == 0:
        saved = torch.load("checkpoint.pt", map_location=device)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        start = saved["epoch"] + 1
    start = hvd.broadcast_object(start, root_rank=0)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())

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

        total = hvd.allreduce(total, op=hvd.Sum, name="total")
        right = hvd.allreduce(right, op=hvd.Sum, name="right")
        loss, accuracy = total.item() / len(train_set), right.item() / len(test_set)
        if hvd.rank() == 0:
            print(
                f"epoch {epoch}: loss {loss:.4f}, accuracy {accuracy:.4f}", flush=True
            )
            state = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "epoch": epoch,
            }
            torch.save(state, "checkpoint.pt")


if __name__ == "__main__":
    main()
