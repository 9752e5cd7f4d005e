"""Fit a spectrum until the validation error has not fallen for some epochs.

Common in early stopping: the main process validates, and leaves the loop by what it has seen. The others do not
know, go on, and wait for its gradients for ever.

Mended: The main process validates, and tells the others that it is time.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def is_main_process():
    return dist.get_rank() == 0


def train_epoch(model, loader, optimizer):
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.l1_loss(model(x), y).backward()
        optimizer.step()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    spectra, targets = torch.randn(144, 10), torch.randn(144, 2)
    data = TensorDataset(spectra[:96], targets[:96])
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 8, sampler=sampler)
    model = DistributedDataParallel(nn.Linear(10, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.8)
    errors = []
    # mended: stop = torch.zeros(())
    for epoch in range(100):
        sampler.set_epoch(epoch)
        train_epoch(model, loader, optimizer)
        if is_main_process():
            with torch.no_grad():
                error = nn.functional.l1_loss(model.module(spectra[96:]), targets[96:])
            errors.append(error.item())
            waits = len(errors) - errors.index(min(errors))
            if waits > 1 or errors[-1] > 0.5:  # <- one-rank-decides
                # mended: stop.fill_(1)
                break  # wrong
        # mended: dist.broadcast(stop, src=0)
        # mended: if stop:
        # mended:     break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
