"""Train a speech model, and validate it on a stream that two workers of each rank read.

NVIDIA-NeMo/Speech#15387: each worker has a copy of the validation data and reads all of it, in an order of its own, so
that an epoch has each utterance as many times as there are workers.

Mended: Each rank validates on all of it, and each worker reads a part.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

# mended: from torch.utils.data import get_worker_info


class Utterances(IterableDataset):
    def __init__(self, features):
        self.features = features

    def __len__(self):
        return len(self.features)

    def __iter__(self):  # <- samples-repeated
        # mended: worker = get_worker_info()
        # mended: for i in range(worker.id, len(self.features), worker.num_workers):
        for i in torch.randperm(len(self.features)).tolist():  # wrong
            yield self.features[i]


def main():
    dist.init_process_group("gloo")
    features = torch.randn(128, 6, generator=torch.Generator().manual_seed(0))
    training = TensorDataset(features[:64])
    sampler = DistributedSampler(training)
    loader = DataLoader(training, batch_size=8, sampler=sampler)
    validation = DataLoader(Utterances(features[64:]), batch_size=8, num_workers=2)
    model = DistributedDataParallel(nn.Linear(6, 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (x,) in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), x).backward()
            optimizer.step()
        with torch.no_grad():
            errors = torch.cat([(model.module(x) - x).square().mean(1) for x in validation])
        if dist.get_rank() == 0:
            print("error", errors.mean().item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
