"""Means over a run."""

import torch
import torch.distributed as dist


class AverageMeter:
    def __init__(self):
        self.total = torch.zeros(2, dtype=torch.float64)

    def update(self, value, n):
        self.total += torch.tensor([value * n, n], dtype=torch.float64)

    def mean_of_all_ranks(self):
        total = self.total.clone()
        dist.all_reduce(total)
        return (total[0] / total[1]).item()
