"""Learn features by following a slow copy of the network.

Common in self-distillation: the teacher is copied before DDP sends out rank 0's weights, and seeds differ between
ranks. The students are equal from then on, and each follows a teacher of its own.

Mended: The teacher is copied from what DDP has sent out.
"""

import copy

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("gloo")
    data = TensorDataset(torch.randn(96, 14, generator=torch.Generator().manual_seed(0)))
    torch.manual_seed(10 + dist.get_rank())
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 8, sampler=sampler)
    network = nn.Sequential(nn.Linear(14, 20), nn.GELU(), nn.Linear(20, 6))
    teacher = copy.deepcopy(network).requires_grad_(False)  # wrong <- replicas-differ-at-start
    student = DistributedDataParallel(network)
    # mended: teacher = copy.deepcopy(network).requires_grad_(False)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for (x,) in loader:
            loss = nn.functional.mse_loss(student(x + 0.1 * torch.randn_like(x)), teacher(x))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for slow, fast in zip(teacher.parameters(), network.parameters(), strict=True):
                    slow.lerp_(fast, 0.01)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
