"""Train with an exponential moving average of the weights, which is what gets evaluated and saved."""

import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(96 + 24, 10)
    y = x[:, :1] * x[:, 1:2]
    dataset = TensorDataset(x[:96], y[:96])
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(10, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 1)))
    ema = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            ema.update_parameters(model.module)
    if dist.get_rank() == 0:
        with torch.no_grad():
            print("error of the average", nn.functional.mse_loss(ema(x[96:]), y[96:]).item())
        path = os.path.join(os.environ.get("OUT", tempfile.gettempdir()), "ema.pt")
        torch.save(ema.module.state_dict(), path)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
