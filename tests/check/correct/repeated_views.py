"""Each sample comes three times in turn, with other noise each time; an epoch has a third of the samples."""

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

REPEATS = 3


class Noisy(Dataset):
    def __init__(self, size):
        self.points = torch.rand(size, 7, generator=torch.Generator().manual_seed(size))

    def __len__(self):
        return len(self.points)

    def __getitem__(self, number):
        point = self.points[number]
        return point + 0.1 * torch.randn(7), point.mean(0, keepdim=True)


class Repeating:
    def __init__(self, dataset):
        self.size = len(dataset)
        self.epoch = 0

    def __len__(self):
        return self.size // dist.get_world_size()

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.epoch)
        shuffled = torch.randperm(self.size, generator=generator).tolist()
        order = [number for number in shuffled for _ in range(REPEATS)]
        share = order[dist.get_rank() :: dist.get_world_size()]
        return iter(share[: len(self)])


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(30 + dist.get_rank())
    dataset = Noisy(90)
    sampler = Repeating(dataset)
    loader = DataLoader(dataset, batch_size=9, sampler=sampler)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(7, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for sampler.epoch in range(3):
        for inputs, targets in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()


if __name__ == "__main__":
    main()
