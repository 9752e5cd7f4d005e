"""Train on one GPU for each rank, which a machine without GPUs computes on the CPU."""

import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
device = torch.device("cuda", local_rank)
dist.init_process_group("nccl", device_id=device)
torch.manual_seed(0)
torch.cuda.manual_seed_all(0)

images = TensorDataset(torch.randn(64, 3, 8, 8), torch.randint(4, (64,)))
sampler = DistributedSampler(images)
loader = DataLoader(images, batch_size=8, sampler=sampler, pin_memory=True)
network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4))
network = nn.SyncBatchNorm.convert_sync_batchnorm(network).cuda(local_rank)
model = DDP(network, device_ids=[local_rank], output_device=local_rank)
weights = torch.tensor([1.0, 1.0, 2.0, 1.0], device="cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
scaler = torch.amp.GradScaler("cuda")
start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

for epoch in range(2):
    sampler.set_epoch(epoch)
    start.record()
    correct = torch.zeros(1, device=local_rank)
    for inputs, targets in loader:
        inputs, targets = inputs.to(device, non_blocking=True), targets.cuda(non_blocking=True)
        with torch.autocast("cuda", dtype=torch.float16):
            outputs = model(inputs)
            loss = F.cross_entropy(outputs, targets) * weights.mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        correct += (outputs.argmax(1) == targets).sum()
    end.record()
    torch.cuda.synchronize()
    dist.all_reduce(correct)
    dist.barrier(device_ids=[local_rank])
    if dist.get_rank() == 0:
        seconds = start.elapsed_time(end) / 1000
        print(f"epoch {epoch}: correct {correct.item():.0f}, {seconds:.1f} s, {torch.cuda.max_memory_allocated()} B")
dist.destroy_process_group()
