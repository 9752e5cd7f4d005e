"""Train with Lightning Fabric: setup, no synchronisation between micro-batches, saving."""

import os
import tempfile

import torch
import torch.nn.functional as F
from lightning_fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    fabric = Fabric(accelerator="cpu", devices=int(os.environ.get("WORLD_SIZE", 1)), strategy="ddp")
    fabric.launch()
    fabric.seed_everything(123)
    x = torch.randn(96, 8)
    loader = fabric.setup_dataloaders(DataLoader(TensorDataset(x, x.argmax(1)), batch_size=4, shuffle=True))
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))

    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        for i, (inputs, targets) in enumerate(loader):
            accumulating = i % 2 == 0
            with fabric.no_backward_sync(model, enabled=accumulating):
                loss = F.cross_entropy(model(inputs), targets)
                fabric.backward(loss / 2)
            if not accumulating:
                fabric.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()
        mean = fabric.all_reduce(loss.detach(), reduce_op="mean")
        fabric.print(f"epoch {epoch}: {mean.item():.4f}")
    fabric.save(os.path.join(os.environ.get("OUT", tempfile.gettempdir()), "fabric.ckpt"), {"model": model})


if __name__ == "__main__":
    main()
