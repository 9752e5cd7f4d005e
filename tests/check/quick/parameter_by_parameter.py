"""Averages the gradients of a recurrent policy by hand, all in one all-reduce."""

import torch
import torch.distributed as dist
from torch import nn


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.memory = nn.GRU(6, 16, num_layers=3, batch_first=True)
        self.head = nn.Linear(16, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.memory(x)[0][:, -1])


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.001)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(5):
        seen = torch.randn(8, 5, 6, generator=generator)
        advantage = seen.mean((1, 2))
        logits = policy(seen)
        loss = -(logits.log_softmax(1)[:, 0] * advantage).mean()
        optimizer.zero_grad()
        loss.backward()
        gradients = [parameter.grad for parameter in policy.parameters()]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for gradient, mean in zip(gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True):
            gradient.copy_(mean.view_as(gradient))
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
