"""Log the mean loss of a group of ranks, which the other ranks do not belong to."""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

import ddpkit


def main():
    context = ddpkit.setup()
    torch.manual_seed(0)
    x = torch.randn(120, 8)
    loader = ddpkit.make_loader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=6)
    first = dist.new_group([0])
    model = ddpkit.wrap_model(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in loader.epochs(2):
        for inputs, targets in loader:
            loss = nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if context.rank == 0:
            print(epoch, ddpkit.all_reduce_mean(loss.item(), group=first))


if __name__ == "__main__":
    main()
