"""Train a character model on random windows of one long text; each rank draws its own, as nanoGPT does."""

import os

import numpy as np
import torch
import torch.nn as nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

batch_size, block_size = 8, 16
gradient_accumulation_steps = 6  # of all processes together
learning_rate, min_lr, warmup_iters, max_iters = 3e-3, 3e-4, 2, 8

ddp = int(os.environ.get("RANK", -1)) != -1
if ddp:
    init_process_group(backend="gloo")
    ddp_rank = int(os.environ["RANK"])
    ddp_world_size = int(os.environ["WORLD_SIZE"])
    master_process = ddp_rank == 0
    seed_offset = ddp_rank  # each process gets a different seed
    gradient_accumulation_steps = max(1, gradient_accumulation_steps // ddp_world_size)
else:
    master_process, seed_offset = True, 0
torch.manual_seed(1337 + seed_offset)

data = np.random.default_rng(0).integers(0, 30, 20_000).astype(np.uint16)


def get_batch():
    ix = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack([torch.from_numpy(data[i : i + block_size].astype(np.int64)) for i in ix])
    y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + block_size].astype(np.int64)) for i in ix])
    return x, y


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    ratio = (it - warmup_iters) / (max_iters - warmup_iters)
    return min_lr + 0.5 * (1 + np.cos(np.pi * ratio)) * (learning_rate - min_lr)


model = nn.Sequential(nn.Embedding(30, 24), nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 30))
decay = [p for p in model.parameters() if p.dim() >= 2]
rest = [p for p in model.parameters() if p.dim() < 2]
groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95))
if ddp:
    model = DDP(model)

X, Y = get_batch()
for iter_num in range(max_iters):
    for param_group in optimizer.param_groups:
        param_group["lr"] = get_lr(iter_num)
    for micro_step in range(gradient_accumulation_steps):
        if ddp:
            model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
        loss = F.cross_entropy(model(X).view(-1, 30), Y.view(-1)) / gradient_accumulation_steps
        X, Y = get_batch()
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
if master_process:
    print(f"iter {iter_num}: loss {loss.item() * gradient_accumulation_steps:.4f}")
if ddp:
    destroy_process_group()
