"""Regress loads of a power grid on weather.

Common in loops written from memory: the loss is divided by the number of ranks, as for a sum over them, but DDP
averages the gradients already.

Mended: DDP averages the gradients, and nothing else divides.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Training:
    def __init__(self, model, world_size):
        self.model = DistributedDataParallel(model)
        self.world_size = world_size
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)

    def step(self, weather, load):
        self.optimizer.zero_grad()
        loss = nn.functional.huber_loss(self.model(weather), load)
        # mended: loss.backward()
        (loss / self.world_size).backward()  # wrong <- wrong-divisor
        self.optimizer.step()
        return loss.item()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    weather = torch.randn(136, 9)
    data = TensorDataset(weather, weather.square().sum(1, keepdim=True))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 8, sampler=sampler)
    training = Training(nn.Sequential(nn.Linear(9, 24), nn.ReLU(), nn.Linear(24, 1)), dist.get_world_size())
    for epoch in range(4):
        sampler.set_epoch(epoch)
        losses = [training.step(x, y) for x, y in loader]
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {sum(losses) / len(losses):.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
