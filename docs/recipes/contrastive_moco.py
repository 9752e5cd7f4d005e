"""Train an encoder with MoCo's loss and a queue in the order of one process."""

import copy

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import ddpkit


def main() -> None:
    context = ddpkit.setup()
    torch.manual_seed(0)
    x = torch.randn(500, 16)
    views = [x + 0.1 * torch.randn_like(x) for _ in range(2)]
    dataset = TensorDataset(*views)
    loader = ddpkit.make_loader(dataset, global_batch_size=48, drop_last=True)
    encoder = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
    model = ddpkit.wrap_model(encoder)  # before copying: it broadcasts rank 0's weights
    momentum = copy.deepcopy(encoder).requires_grad_(False)
    queue = ddpkit.broadcast(F.normalize(torch.randn(256, 8))).to(context.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, (first, second) in enumerate(loader):
        with torch.no_grad():
            keys = F.normalize(shuffled(momentum, second.to(context.device), seed=step))
        queries = F.normalize(model(first.to(context.device)))
        own_keys = (queries * keys).sum(1, keepdim=True)
        logits = torch.cat([own_keys, queries @ queue.T], 1) / 0.2
        own = torch.zeros(len(logits), dtype=torch.long, device=logits.device)
        loss = F.cross_entropy(logits, own)
        optimizer.zero_grad()
        (loss * loader.weight).backward()
        optimizer.step()
        with torch.no_grad():
            queue = torch.cat([queue, ddpkit.gather_batch(keys)])[-len(queue) :]
            pairs = zip(momentum.parameters(), encoder.parameters(), strict=True)
            for mean, now in pairs:
                mean.lerp_(now, 0.01)
    loss = ddpkit.all_reduce_mean(loss.item(), weight=loader.samples)
    if ddpkit.is_main_process():
        print("loss:", loss)


def shuffled(model: nn.Module, x: torch.Tensor, seed: int) -> torch.Tensor:
    """Run a model on a random share of all samples: MoCo's shuffled BatchNorm."""
    rank, world_size = ddpkit.get_rank(), ddpkit.get_world_size()
    joined = ddpkit.gather_batch(x)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(joined), generator=generator).to(x.device)
    outputs = ddpkit.gather_batch(model(joined[order[rank::world_size]]))
    return outputs[order.argsort()][rank::world_size]


if __name__ == "__main__":
    main()
