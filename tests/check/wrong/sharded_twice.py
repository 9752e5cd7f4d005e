"""Train a classifier, and evaluate it on all ranks.

Common in evaluation: a batch sampler deals every other batch of a sampler that has dealt the samples to the ranks
already, so the metric is that of half of the samples.

Mended: The samples are dealt to the ranks once.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset


class MyBatches(BatchSampler):
    """Batches of this rank."""

    def __iter__(self):
        for number, batch in enumerate(super().__iter__()):
            if number % dist.get_world_size() == dist.get_rank():
                yield batch


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(128, 6)
    data = TensorDataset(x, (x.sum(1) > 0).long())
    train, held_out = TensorDataset(*data[:64]), TensorDataset(*data[64:])
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=8, sampler=sampler)
    # mended: batches = MyBatches(range(len(held_out)), 8, False)
    batches = MyBatches(DistributedSampler(held_out, shuffle=False), 8, False)  # wrong <- samples-missing
    evaluation = DataLoader(held_out, batch_sampler=batches)
    model = DDP(nn.Linear(6, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
        right = torch.zeros(2)
        with torch.no_grad():
            for inputs, labels in evaluation:
                right += torch.tensor([(model.module(inputs).argmax(1) == labels).sum(), len(labels)])
        dist.all_reduce(right)
        if dist.get_rank() == 0:
            print(f"{right[0] / right[1]:.0%} are right")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
