"""Train a classifier and report the loss of each class, averaged over all ranks.

ai2cm/ace#1466: one all-reduce for each key of a dict, in the order in which the keys came in. The order
differs between ranks, so the loss of one class is added to that of another.

Mended: The keys are sorted.
"""

from collections import defaultdict

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class PerClassLossAggregator:
    def __init__(self):
        self._sums = defaultdict(lambda: torch.zeros(2))

    @torch.no_grad()
    def record(self, losses, labels):
        for loss, label in zip(losses, labels.tolist(), strict=True):
            self._sums[label] += torch.stack([loss, torch.ones(())])

    def get_logs(self):
        logs = {}
        # mended: for label, total in sorted(self._sums.items()):
        for label, total in self._sums.items():  # wrong
            dist.all_reduce(total)  # <- collective-order
            logs[f"train/loss/{label}"] = round((total[0] / total[1]).item(), 3)
        return logs


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(4)
    x = torch.randn(120, 7)
    dataset = TensorDataset(x, x[:, :5].argmax(1))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=10, sampler=sampler)
    model = DDP(nn.Linear(7, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        aggregator = PerClassLossAggregator()
        for inputs, labels in loader:
            losses = nn.functional.cross_entropy(model(inputs), labels, reduction="none")
            aggregator.record(losses, labels)
            optimizer.zero_grad()
            losses.mean().backward()
            optimizer.step()
        logs = aggregator.get_logs()
        if dist.get_rank() == 0:
            print(epoch, dict(sorted(logs.items())))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
