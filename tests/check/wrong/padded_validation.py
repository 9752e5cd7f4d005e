"""Train a classifier and evaluate its accuracy on all ranks.

pytorch/pytorch#25162: DistributedSampler repeats samples where the data does not divide by the number of
ranks. What it adds is counted, in the accuracy and in the number of samples.

Mended: Each rank evaluates its own part of the data, which need not be as long as the others'.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.optim as optim
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

# mended: from torch.utils.data import Subset


def make_data(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 10, generator=g)
    return TensorDataset(x, (x[:, 0] * x[:, 1] > 0).long())


def validate(model, loader):
    model.eval()
    correct, seen = torch.zeros(()), torch.zeros(())
    with torch.no_grad():
        for images, target in loader:
            correct += (model(images).argmax(dim=1) == target).sum()
            seen += len(target)
    dist.all_reduce(correct)
    dist.all_reduce(seen)
    return 100 * correct.item() / seen.item()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    train_dataset, val_dataset = make_data(96, 1), make_data(41, 2)
    train_sampler = DistributedSampler(train_dataset)
    train_loader = DataLoader(train_dataset, batch_size=8, sampler=train_sampler)
    # mended: val_dataset = Subset(val_dataset, range(dist.get_rank(), len(val_dataset), dist.get_world_size()))
    # mended: val_loader = DataLoader(val_dataset, batch_size=8)
    val_sampler = DistributedSampler(val_dataset, shuffle=False)  # wrong <- padding-counted
    val_loader = DataLoader(val_dataset, batch_size=8, sampler=val_sampler)  # wrong

    model = DDP(nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 2)))
    criterion = nn.CrossEntropyLoss()
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    for epoch in range(2):
        train_sampler.set_epoch(epoch)
        model.train()
        for images, target in train_loader:
            loss = criterion(model(images), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        acc1 = validate(model.module, val_loader)
        if dist.get_rank() == 0:
            print(f" * Acc@1 {acc1:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
