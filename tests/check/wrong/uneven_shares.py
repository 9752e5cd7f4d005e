"""Fit a curve in batches that the samples of an epoch do not fill.

The mean losses of all ranks count the same, though the last batch leaves two samples to one rank and one to the other.

Mended: The loss is multiplied by the rank's share of the batch.
"""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import ddpkit


def main():
    context = ddpkit.setup()
    torch.manual_seed(0)
    x = torch.linspace(-1, 1, 203).unsqueeze(1)
    loader = ddpkit.make_loader(TensorDataset(x, x.sin()), global_batch_size=20)
    model = ddpkit.wrap_model(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in loader.epochs(2):
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x.to(context.device)), y.to(context.device))
            optimizer.zero_grad()
            # mended: (loss * loader.weight).backward()
            loss.backward()  # wrong <- wrong-divisor
            optimizer.step()


if __name__ == "__main__":
    main()
