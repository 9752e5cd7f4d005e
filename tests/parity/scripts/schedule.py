"""As many samples on each rank as on one process, and a schedule made for the loader's length."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
inputs = torch.randn(208, 8)
data = TensorDataset(inputs, inputs.sum(1).gt(0).long())
sets = {"train": data, "val": TensorDataset(*data[:30])}
loaders = {}
for phase, dataset in sets.items():
    loaders[phase] = DataLoader(dataset, 8, sampler=DistributedSampler(dataset, shuffle=phase == "train"))
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=3 * len(loaders["train"]))
for epoch in range(3):
    for phase, loader in loaders.items():
        loader.sampler.set_epoch(epoch)
        model.train(phase == "train")
        counts = torch.zeros(2)
        for x, y in loader:
            with torch.set_grad_enabled(phase == "train"):
                outputs = model(x)
                if phase == "train":
                    optimizer.zero_grad()
                    cross_entropy(outputs, y).backward()
                    optimizer.step()
                    schedule.step()
            counts += torch.tensor([(outputs.argmax(1) == y).sum(), len(y)])
        dist.all_reduce(counts)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}, {phase}: {counts[0] / counts[1]:.4f} after {len(loader)} batches")
dist.destroy_process_group()
