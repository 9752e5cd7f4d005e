"""Evaluate accuracy and loss on an uneven test set with sums over all ranks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


@torch.no_grad()
def evaluate(net, loader):
    net.eval()
    sums = torch.zeros(3, dtype=torch.float64)  # loss, correct, samples
    for x, y in loader:
        logits = net(x)
        sums[0] += nn.functional.cross_entropy(logits, y, reduction="sum")
        sums[1] += (logits.argmax(1) == y).sum()
        sums[2] += len(y)
    dist.all_reduce(sums)
    net.train()
    return (sums[0] / sums[2]).item(), (sums[1] / sums[2]).item(), int(sums[2])


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    x = torch.randn(96 + 53, 7)
    y = (x.sum(1) > 0).long()
    train, test = TensorDataset(x[:96], y[:96]), TensorDataset(x[96:], y[96:])
    sampler = DistributedSampler(train)
    train_loader = DataLoader(train, batch_size=16, sampler=sampler)
    test_loader = DataLoader(Subset(test, range(rank, len(test), world_size)), batch_size=16)
    model = DDP(nn.Linear(7, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, targets in train_loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
        loss, accuracy, n = evaluate(model.module, test_loader)
        if rank == 0:
            print(f"epoch {epoch}: loss {loss:.4f}, accuracy {accuracy:.4f} of {n}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
