"""Two tasks with a loader and batches of their own count alike in each step, as is meant."""

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BATCHES = {"words": 12, "tags": 5}


class Tagger(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Linear(9, 20)
        self.heads = torch.nn.ModuleDict({task: torch.nn.Linear(20, 4) for task in BATCHES})

    def forward(self, inputs, task):
        return self.heads[task](self.body(inputs).tanh())


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    loaders = {}
    for task, size in BATCHES.items():
        inputs = torch.randn(16 * size, 9)
        dataset = TensorDataset(inputs, inputs[:, :4].argmin(1))
        loaders[task] = DataLoader(dataset, size, sampler=DistributedSampler(dataset))
    model = torch.nn.parallel.DistributedDataParallel(Tagger(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        for loader in loaders.values():
            loader.sampler.set_epoch(epoch)
        iterators = {task: iter(loader) for task, loader in loaders.items()}
        for _ in range(min(map(len, loaders.values()))):
            optimizer.zero_grad()
            for task, iterator in iterators.items():
                inputs, targets = next(iterator)
                loss = functional.cross_entropy(model(inputs, task), targets)
                (loss / len(loaders)).backward()
            optimizer.step()


if __name__ == "__main__":
    main()
