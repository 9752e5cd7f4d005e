"""Train a draft model, stop, and resume from the checkpoint.

vllm-project/speculators#926: only rank 0 loads the checkpoint. DDP broadcasts the weights when it wraps the
model, but not the optimizer's moments: rank 0 goes on with them and the others begin anew.

Mended: Every rank loads the checkpoint.
"""

import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def train(path, first_epoch, last_epoch, resume):
    rank = dist.get_rank()
    torch.manual_seed(0)
    hidden = torch.randn(96, 16)
    dataset = TensorDataset(hidden, hidden.roll(1, dims=1))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)

    model = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    # mended: if resume:
    if resume and rank == 0:  # wrong <- replicas-drift
        checkpoint = torch.load(path, weights_only=True)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
    model = DistributedDataParallel(model)

    for epoch in range(first_epoch, last_epoch):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            loss = nn.functional.smooth_l1_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    if rank == 0:
        torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}, path)
        print("trained up to epoch", last_epoch)
    dist.barrier()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    path = Path(os.environ.get("OUT", tempfile.gettempdir())) / "draft.pt"
    train(path, 0, 2, resume=False)
    train(path, 2, 4, resume=True)
    dist.destroy_process_group()
