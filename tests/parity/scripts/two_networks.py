"""A generator against a critic, with noise that each rank draws by a seed of its own."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(96, 6) * 2 + 1)
torch.manual_seed(dist.get_rank())
makes = DistributedDataParallel(nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 6)))
judges = DistributedDataParallel(nn.Sequential(nn.Linear(6, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1)))
optimizers = [torch.optim.Adam(network.parameters(), 2e-3, betas=(0.5, 0.999)) for network in (makes, judges)]
loss = nn.BCEWithLogitsLoss()
sampler = DistributedSampler(data)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for (real,) in DataLoader(data, 8, sampler=sampler, drop_last=True):
        fake = makes(torch.randn(len(real), 4))
        labels = torch.cat([torch.ones(len(real), 1), torch.zeros(len(real), 1)])
        optimizers[1].zero_grad()
        loss(judges(torch.cat([real, fake.detach()])), labels).backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        loss(judges(fake), torch.ones(len(real), 1)).backward()
        optimizers[0].step()
    if dist.get_rank() == 0:
        with torch.no_grad():
            mean = makes.module.eval()(torch.ones(5, 4)).mean()
        print(f"epoch {epoch}: mean {mean:.4f}")
        makes.train()
dist.destroy_process_group()
