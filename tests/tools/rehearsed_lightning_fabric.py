"""A training script with Lightning Fabric's save and load: `rehearsed_lightning_fabric.py BUG FOLDER`."""

import os
import sys

import torch
from lightning_fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main(bug: str, folder: str) -> None:
    fabric = Fabric(accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy="ddp")
    fabric.launch()
    fabric.seed_everything(0)
    data = TensorDataset(torch.randn(96, 2), torch.randn(96, 1))
    loader = fabric.setup_dataloaders(DataLoader(data, batch_size=12 // fabric.world_size, shuffle=True))
    model = nn.Linear(2, 1)
    model, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters(), lr=0.05))
    state = {"model": model, "optimizer": optimizer, "epoch": 0}
    path = os.path.join(folder, "last.ckpt")
    if os.path.exists(path):
        fabric.load(path, state)
    for epoch in range(state["epoch"], 3):
        if bug != "loader":  # it counts the epochs of a start, which begins at 0 again
            loader._num_iter_calls = epoch
        for x, y in loader:
            optimizer.zero_grad()
            fabric.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
        state["epoch"] = epoch + 1
        fabric.save(path + ".new", state)
        if fabric.is_global_zero:
            os.replace(path + ".new", path)
        fabric.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
