"""Batches drawn by index, one ahead; the micro-batches of a step are divided among the ranks; rank 0 evaluates."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
micro_batches = 4 // world_size
text = torch.randint(11, (500,), generator=torch.Generator().manual_seed(0))
torch.manual_seed(1337 + rank)
net = nn.Sequential(nn.Embedding(11, 16), nn.Dropout(0.1), nn.Linear(16, 11))
optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
model = DistributedDataParallel(net)


def draw() -> tuple[Tensor, Tensor]:
    starts = torch.randint(len(text) - 8, (3,))
    windows = torch.stack([text[start : start + 9] for start in starts])
    return windows[:, :-1], windows[:, 1:]


def mean_loss(network: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(network(x).flatten(0, 1), y.flatten())


x, y = draw()
for step in range(20):
    if step % 3 == 0 and rank == 0:
        net.eval()
        with torch.no_grad():
            losses = [mean_loss(net, *draw()) for _ in range(3)]
        net.train()
        print(f"step {step}: validation loss {torch.stack(losses).mean():.4f}")
    for micro in range(micro_batches):
        model.require_backward_grad_sync = micro == micro_batches - 1
        loss = mean_loss(model, x, y) / micro_batches
        x, y = draw()
        loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
