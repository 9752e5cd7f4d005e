"""Fit a scene to views that are rendered from random cameras, with Lightning Fabric.

threestudio-project/threestudio#195: the seed is the same on each GPU and cameras are drawn from it, so all
GPUs render the same views: several give the same result as one.

Mended: After the model is made, each rank goes on with a seed of its own.
"""

import os

import torch
from lightning_fabric import Fabric, seed_everything
from torch import nn
from torch.utils.data import DataLoader, IterableDataset


class RandomCameras(IterableDataset):
    def __init__(self, views_per_epoch):
        self.views_per_epoch = views_per_epoch

    def __iter__(self):
        for _ in range(self.views_per_epoch):
            elevation = torch.rand(()) * 90
            azimuth = torch.rand(()) * 360 - 180
            yield torch.stack([elevation.deg2rad(), azimuth.deg2rad()])


def guidance(views):
    return torch.stack([views[:, 0].sin(), views[:, 1].cos(), views.prod(1).tanh()], dim=1)


def main():
    fabric = Fabric(accelerator="cpu", devices=int(os.environ.get("WORLD_SIZE", 1)), strategy="ddp")
    fabric.launch()
    seed_everything(0)  # <- same-samples
    scene = nn.Sequential(nn.Linear(2, 64), nn.Softplus(), nn.Linear(64, 3))
    optimizer = torch.optim.Adam(scene.parameters(), lr=1e-2)
    scene, optimizer = fabric.setup(scene, optimizer)
    # mended: seed_everything(1 + fabric.global_rank)
    cameras = fabric.setup_dataloaders(DataLoader(RandomCameras(32), batch_size=8))
    for epoch in range(2):
        for views in cameras:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(scene(views), guidance(views))
            fabric.backward(loss)
            optimizer.step()
        fabric.print(epoch, fabric.all_reduce(loss.detach()).item())


if __name__ == "__main__":
    main()
