"""Reconstruct shapes; the network is loaded for evaluation by another program.

menzelab/implicit-shape-reconstruction#2: the state that is saved is the parallel wrapper's, every name in it
begins with "module.", and a plain network does not load it.
"""

import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def make_network():
    return nn.Sequential(nn.Linear(3, 64), nn.Softplus(beta=100), nn.Linear(64, 1))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = DDP(make_network())
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
    points = torch.rand(240, 3) * 2 - 1
    dataset = TensorDataset(points, points.norm(dim=1, keepdim=True) - 0.5)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=20, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for coordinates, distances in loader:
            loss = nn.functional.l1_loss(net(coordinates), distances)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    if dist.get_rank() == 0:
        path = os.path.join(os.environ.get("OUT", tempfile.gettempdir()), "net.pt")
        torch.save({"epoch": epoch, "net_state": net.state_dict()}, path)  # <- wrapper-prefix
        print("saved")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
