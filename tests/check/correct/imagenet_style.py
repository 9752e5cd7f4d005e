"""Train a small ResNet on images made in memory, in the style of the ImageNet example."""

import argparse
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser(description="Small ImageNet training")
parser.add_argument("-j", "--workers", default=0, type=int)
parser.add_argument("--epochs", default=2, type=int)
parser.add_argument("-b", "--batch-size", default=32, type=int, help="images per step of all processes together")
parser.add_argument("--lr", default=0.1, type=float)
parser.add_argument("--momentum", default=0.9, type=float)
parser.add_argument("--wd", default=1e-4, type=float)


class BasicBlock(nn.Module):
    def __init__(self, planes):
        super().__init__()
        self.conv1 = nn.Conv2d(planes, planes, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)

    def forward(self, x):
        out = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(x + self.bn2(self.conv2(out)))


class AverageMeter:
    def __init__(self):
        self.sum, self.count = 0.0, 0

    def update(self, val, n):
        self.sum += val * n
        self.count += n

    def all_reduce(self):
        total = torch.tensor([self.sum, self.count], dtype=torch.float64)
        dist.all_reduce(total)
        self.sum, self.count = total.tolist()


def train(loader, model, criterion, optimizer):
    model.train()
    for images, target in loader:
        loss = criterion(model(images), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def validate(loader, model, args):
    def run_validate(loader):
        with torch.no_grad():
            for images, target in loader:
                top1.update((model(images).argmax(1) == target).float().mean().item(), len(target))

    top1 = AverageMeter()
    model.eval()
    run_validate(loader)
    top1.all_reduce()
    counted = len(loader.sampler) * dist.get_world_size()
    if counted < len(loader.dataset):  # the sampler leaves out what does not divide: every process does that
        rest = Subset(loader.dataset, range(counted, len(loader.dataset)))
        run_validate(DataLoader(rest, args.batch_size))
    return top1.sum / top1.count


def main():
    args = parser.parse_args()
    dist.init_process_group("gloo")
    args.batch_size //= dist.get_world_size()
    torch.manual_seed(0)
    images = torch.rand(96 + 33, 3, 6, 6)
    target = (images.mean((1, 2, 3)) > 0.5).long()
    train_dataset, val_dataset = TensorDataset(images[:96], target[:96]), TensorDataset(images[96:], target[96:])
    train_sampler = DistributedSampler(train_dataset)
    val_sampler = DistributedSampler(val_dataset, shuffle=False, drop_last=True)
    train_loader = DataLoader(train_dataset, args.batch_size, sampler=train_sampler, num_workers=args.workers)
    val_loader = DataLoader(val_dataset, args.batch_size, sampler=val_sampler, num_workers=args.workers)

    net = nn.Sequential(nn.Conv2d(3, 8, 1), BasicBlock(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2))
    model = nn.parallel.DistributedDataParallel(net)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=args.momentum, weight_decay=args.wd)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.1)
    best_acc1 = 0.0
    for epoch in range(args.epochs):
        train_sampler.set_epoch(epoch)
        train(train_loader, model, criterion, optimizer)
        acc1 = validate(val_loader, model, args)
        scheduler.step()
        best_acc1 = max(acc1, best_acc1)
        if dist.get_rank() == 0:
            print(f" * Acc@1 {acc1:.3f}")
            state = {"epoch": epoch + 1, "state_dict": model.module.state_dict(), "best_acc1": best_acc1}
            torch.save(state, os.path.join(os.environ.get("OUT", tempfile.gettempdir()), "checkpoint.pth.tar"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
