"""Train a GPT-like model with several micro-steps for each optimizer step, in the way of a well-known video.

karpathy/build-nanogpt#30: `require_backward_grad_sync` is set between forward and backward. DDP looks at it
in forward, so it acts one micro-step late: the first micro-step is averaged, those after it never.

Mended: The flag is set before the forward pass.
"""

import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group(backend="gloo")
ddp_rank = int(os.environ["RANK"])
ddp_world_size = int(os.environ["WORLD_SIZE"])
master_process = ddp_rank == 0
torch.manual_seed(1337)


class DataLoaderLite:
    def __init__(self, B, T, process_rank, num_processes):
        self.B, self.T = B, T
        self.process_rank, self.num_processes = process_rank, num_processes
        self.tokens = torch.randint(32, (8000,), generator=torch.Generator().manual_seed(11))
        self.current_position = B * T * process_rank

    def next_batch(self):
        buf = self.tokens[self.current_position : self.current_position + self.B * self.T + 1]
        self.current_position += self.B * self.T * self.num_processes
        return buf[:-1].view(self.B, self.T), buf[1:].view(self.B, self.T)


total_batch_size = 768  # tokens, of all ranks and micro-steps
B, T = 4, 16
grad_accum_steps = total_batch_size // (B * T * ddp_world_size)
train_loader = DataLoaderLite(B, T, ddp_rank, ddp_world_size)

model = DDP(nn.Sequential(nn.Embedding(32, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95))

for step in range(6):
    optimizer.zero_grad()
    loss_accum = torch.zeros(())
    for micro_step in range(grad_accum_steps):
        x, y = train_loader.next_batch()
        # mended: model.require_backward_grad_sync = micro_step == grad_accum_steps - 1
        logits = model(x)
        loss = F.cross_entropy(logits.view(-1, 32), y.view(-1)) / grad_accum_steps
        loss_accum += loss.detach()
        model.require_backward_grad_sync = micro_step == grad_accum_steps - 1  # wrong <- gradients-not-averaged
        loss.backward()
    dist.all_reduce(loss_accum)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for group in optimizer.param_groups:
        group["lr"] = 3e-4 * 0.5 * (1 + math.cos(math.pi * step / 6))
    optimizer.step()
    if master_process:
        print(f"step {step} | loss: {loss_accum.item() / ddp_world_size:.6f}")
dist.destroy_process_group()
