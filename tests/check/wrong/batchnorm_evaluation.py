"""Train a detector's backbone with BatchNorm and evaluate it on all ranks.

open-mmlab/mmdetection#2539: with `broadcast_buffers=False` each rank keeps running statistics of its own. The
ranks evaluate different networks, and the checkpoint is none of them but rank 0's.

Mended: DDP broadcasts the buffers, in evaluation too.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def backbone():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    )


def single_epoch(model, loader, optimizer):
    model.train()
    for img, gt in loader:
        loss = nn.functional.cross_entropy(model(img), gt)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@torch.no_grad()
def multi_gpu_test(model, loader):
    model.eval()
    hits = torch.zeros(2)
    for img, gt in loader:
        hits += torch.stack([(model(img).argmax(1) == gt).sum(), torch.tensor(len(gt))])
    dist.all_reduce(hits)
    return (hits[0] / hits[1]).item()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    images = torch.rand(96 + 48, 3, 6, 6) * torch.rand(144, 3, 1, 1)
    labels = images.mean((2, 3)).argmax(1)
    train, test = TensorDataset(images[:96], labels[:96]), TensorDataset(images[96:], labels[96:])
    sampler = DistributedSampler(train)
    train_loader = DataLoader(train, batch_size=8, sampler=sampler)
    test_loader = DataLoader(test, batch_size=8, sampler=DistributedSampler(test, shuffle=False))
    # mended: model = DistributedDataParallel(backbone())
    model = DistributedDataParallel(backbone(), broadcast_buffers=False)  # wrong <- replicas-drift
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        single_epoch(model, train_loader, optimizer)
        accuracy = multi_gpu_test(model, test_loader)
        if dist.get_rank() == 0:
            print(f"Epoch(val) [{epoch}] acc: {accuracy:.3f}")
    dist.destroy_process_group()
