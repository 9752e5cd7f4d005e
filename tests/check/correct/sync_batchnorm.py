"""Train a network with BatchNorm, over all ranks' samples where there are GPUs."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
model = nn.Sequential(nn.Linear(6, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 1))
if torch.cuda.is_available():
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model).cuda()
device = next(model.parameters()).device
model = DistributedDataParallel(model)
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
x = torch.randn(192, 6, generator=torch.Generator().manual_seed(0))
dataset = TensorDataset(x, x.norm(dim=1, keepdim=True))
sampler = DistributedSampler(dataset, drop_last=True)
loader = DataLoader(dataset, batch_size=16, sampler=sampler, drop_last=True)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs.to(device)), targets.to(device))
        loss.backward()
        optimizer.step()
if dist.get_rank() == 0:
    print("trained", epoch + 1, "epochs")
dist.destroy_process_group()
