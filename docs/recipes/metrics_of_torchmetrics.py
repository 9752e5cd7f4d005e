"""Compute torchmetrics over all ranks, and count each sample once."""

import torch
from torch import nn
from torch.utils.data import TensorDataset
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC

import ddpkit


def main() -> None:
    context = ddpkit.setup()
    torch.manual_seed(0)
    points = torch.randn(101, 2)
    labels = (points[:, 0] > 0).long() * 2 + (points[:, 1] > 0).long()
    # each of the 101 samples once
    loader = ddpkit.make_loader(
        TensorDataset(points, labels), batch_size=8, train=False
    )
    model = nn.Linear(2, 4).to(context.device)  # not wrapped: it is not trained
    metrics = MetricCollection([MulticlassAccuracy(4), MulticlassAUROC(4)])
    metrics = metrics.to(context.device)
    with torch.no_grad():
        for x, y in loader:
            metrics.update(model(x.to(context.device)), y.to(context.device))
    found = metrics.compute()  # on every rank: it is collective
    if ddpkit.is_main_process():
        print("area under the curve:", found["MulticlassAUROC"].item())
    ddpkit.teardown()


if __name__ == "__main__":
    main()
