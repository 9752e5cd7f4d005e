"""Learn which points lie in a circle."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import ddpkit


def make_data(n: int) -> TensorDataset:
    points = torch.randn(n, 2)
    return TensorDataset(points, (points.norm(dim=1, keepdim=True) < 1).float())


def main(epochs: int = 5) -> None:
    context = ddpkit.setup()
    device = context.device

    torch.manual_seed(0)
    train_set, test_set = make_data(6000), make_data(1200)
    train_loader = ddpkit.make_loader(train_set, global_batch_size=60)
    test_loader = ddpkit.make_loader(test_set, batch_size=100, train=False)

    model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 1))
    model = ddpkit.wrap_model(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    run = {"model": model, "optimizer": optimizer, "loader": train_loader}
    checkpoints = ddpkit.Checkpointer("checkpoints")
    checkpoints.load_latest(**run)

    for epoch in train_loader.epochs(epochs):
        total = torch.zeros((), device=device)
        for x, y in train_loader:
            x, y = x.to(device), y.to(device)
            loss = nn.functional.binary_cross_entropy_with_logits(model(x), y)
            optimizer.zero_grad()
            (loss * train_loader.weight).backward()
            optimizer.step()
            total += loss.detach() * train_loader.samples

        right = torch.zeros((), device=device)
        bare = ddpkit.unwrap_model(model)  # ranks may have unequal numbers of batches
        with torch.no_grad():
            for x, y in test_loader:
                x, y = x.to(device), y.to(device)
                right += ((bare(x) > 0) == y).sum()

        total, right = ddpkit.all_reduce((total.item(), right.item()))
        loss, accuracy = total / len(train_set), right / len(test_set)
        if ddpkit.is_main_process():
            print(
                f"epoch {epoch}: loss {loss:.4f}, accuracy {accuracy:.4f}", flush=True
            )
        checkpoints.save(epoch, **run)


if __name__ == "__main__":
    main()
