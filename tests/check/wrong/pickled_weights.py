"""Predict yields, and pickle the weights for the program that serves them.

Common where weights leave torch: the state is the wrapper's, and the names in the pickle begin with "module.",
which the network that is to be served does not know.
"""

import os
import pickle

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def export(model, path):
    weights = {name: weight.detach().cpu() for name, weight in model.state_dict().items()}
    with open(path, "wb") as file:
        pickle.dump({"weights": weights, "format": 2}, file)  # <- wrapper-prefix


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(9)
    fields = torch.randn(72, 7)
    data = TensorDataset(fields, fields.sum(1, keepdim=True))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 9, sampler=sampler)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(7, 7), nn.ReLU(), nn.Linear(7, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    if dist.get_rank() == 0:
        export(model, os.path.join(os.environ.get("OUT", "."), "weights.pkl"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
