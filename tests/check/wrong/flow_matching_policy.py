"""Train a flow-matching policy.

Robbyant/lingbot-vla-v2#41: the seed is the same on every rank and noise and times are drawn from it. The
samples differ between ranks, the noise and the times never do.

Mended: Noise and times come from a seed that differs between ranks.
"""

import os
import random

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def set_seed(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


class FlowPolicy(nn.Module):
    def __init__(self, obs=10, act=4):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(obs + act + 1, 64), nn.SiLU(), nn.Linear(64, act))

    def forward(self, obs, actions):
        noise = torch.randn(actions.shape)  # <- same-random-numbers
        time = torch.rand(len(actions), 1)  # <- same-random-numbers
        x_t = time * noise + (1 - time) * actions
        v_t = self.net(torch.cat([obs, x_t, time], dim=1))
        return nn.functional.mse_loss(v_t, noise - actions)


def main():
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    set_seed(42)
    obs = torch.randn(120, 10)
    dataset = TensorDataset(obs, torch.tanh(obs[:, :4]))
    sampler = DistributedSampler(dataset, seed=42)
    loader = DataLoader(dataset, batch_size=10, sampler=sampler)
    model = DDP(FlowPolicy())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    # mended: set_seed(42 + 1 + rank)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for batch in loader:
            loss = model(*batch)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    if rank == 0:
        print("finished")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
