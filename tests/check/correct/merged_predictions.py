"""Evaluates on padded shares and gathers predictions with the samples' numbers, so what comes twice is counted once."""

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Numbered(Dataset):
    def __init__(self, size):
        self.points = torch.randn(size, 6, generator=torch.Generator().manual_seed(size))

    def __len__(self):
        return len(self.points)

    def __getitem__(self, number):
        return number, self.points[number], (self.points[number].sum() > 0).long()


@torch.no_grad()
def accuracy(network, dataset):
    world_size = dist.get_world_size()
    kept = []
    for numbers, points, classes in DataLoader(dataset, batch_size=5, sampler=DistributedSampler(dataset)):
        kept.append(torch.stack([numbers, (network(points).argmax(1) == classes).long()]))
    numbers, correct = torch.cat(kept, dim=1)
    all_numbers = [torch.empty_like(numbers) for _ in range(world_size)]
    all_correct = [torch.empty_like(correct) for _ in range(world_size)]
    dist.all_gather(all_numbers, numbers)
    dist.all_gather(all_correct, correct)
    table = torch.zeros(len(dataset))
    table[torch.cat(all_numbers)] = torch.cat(all_correct).float()
    return table.mean().item()


@torch.no_grad()
def scores(network, dataset):
    found = {}
    sampler = DistributedSampler(dataset, shuffle=False)
    for numbers, points, _ in DataLoader(dataset, batch_size=5, sampler=sampler):
        found.update(zip(numbers.tolist(), network(points)[:, 0].tolist(), strict=True))
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, found)
    return {number: score for part in parts for number, score in part.items()}


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    training, held_out = Numbered(64), Numbered(29)
    sampler = DistributedSampler(training)
    loader = DataLoader(training, batch_size=8, sampler=sampler)
    network = torch.nn.Linear(6, 2)
    model = torch.nn.parallel.DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for _, points, classes in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(points), classes).backward()
            optimizer.step()
        print(accuracy(network, held_out), len(scores(network, held_out)))


if __name__ == "__main__":
    main()
