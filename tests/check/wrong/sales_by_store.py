"""Forecast sales; each rank evaluates its stores, of which some are open longer than others.

The ranks' mean errors are averaged with equal weights, though they are of different numbers of windows.

Mended: Each mean is weighted with its number of windows.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ddpkit


@torch.no_grad()
def evaluate(model, stores, context):
    network = ddpkit.unwrap_model(model).eval()
    error, windows = 0.0, 0
    for store in stores[context.rank :: context.world_size]:
        for x, y in DataLoader(store, batch_size=16):
            error += (network(x) - y).abs().sum().item()
            windows += len(x)
    network.train()
    # mended: return ddpkit.all_reduce_mean({"error": error / windows}, weight=windows)
    return ddpkit.all_reduce_mean({"error": error / windows})  # wrong <- mean-of-means


def main():
    context = ddpkit.setup()
    torch.manual_seed(0)
    x = torch.randn(240, 14)
    data = TensorDataset(x, x[:, -1:] + 0.1 * torch.randn(240, 1))
    stores = [TensorDataset(*data[:40]), TensorDataset(*data[40:60]), TensorDataset(*data[60:110])]
    loader = ddpkit.make_loader(TensorDataset(*data[110:]), batch_size=13)
    model = ddpkit.wrap_model(nn.Sequential(nn.Linear(14, 32), nn.GELU(), nn.Linear(32, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for epoch in loader.epochs(2):
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        trained = ddpkit.all_reduce_mean(loss.detach())
        result = evaluate(model, stores, context)
        if ddpkit.is_main_process():
            print(f"epoch {epoch}: last batch {trained.item():.3f}, error {result['error']:.3f}")


if __name__ == "__main__":
    main()
