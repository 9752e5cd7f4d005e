"""Each rank has an expert, which gets samples of all ranks; the gradients of the rest are averaged by hand."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_to_all_single


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    trunk, head = nn.Linear(6, 8), nn.Linear(8, 1)
    torch.manual_seed(1 + rank)
    expert = nn.Linear(8, 8)
    shared = [*trunk.parameters(), *head.parameters()]
    optimizer = torch.optim.SGD([*shared, *expert.parameters()], lr=0.1)
    for _ in range(5):
        x = torch.randn(12, 6)
        features = trunk(x)
        sent = all_to_all_single(torch.empty_like(features), features)
        back = all_to_all_single(torch.empty_like(features), expert(sent).relu())
        loss = nn.functional.mse_loss(head(back), x.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        for p in shared:
            dist.all_reduce(p.grad)
            p.grad /= world_size
        for p in expert.parameters():
            p.grad /= world_size
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
