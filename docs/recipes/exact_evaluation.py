"""Evaluate each sample once, with predictions in the order of the dataset."""

import torch
from torch import nn

import ddpkit


class Points(torch.utils.data.Dataset):
    """Random points, each returned with its index."""

    def __init__(self) -> None:
        self.points = torch.randn(101, 2)

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.points[index], index


def main() -> None:
    context = ddpkit.setup()
    torch.manual_seed(0)
    # not wrapped, because nothing is trained
    dataset, model = Points(), nn.Linear(2, 4).to(context.device)
    labels = (dataset.points[:, 0] > 0).long() * 2 + (dataset.points[:, 1] > 0).long()
    loader = ddpkit.make_loader(dataset, batch_size=8, train=False)
    found, indices = [], []
    with torch.no_grad():
        for points, index in loader:
            found.append(model(points.to(context.device)).argmax(1))
            indices.append(index)
    predictions = ddpkit.gather_exact(
        torch.cat(found), torch.cat(indices), n=len(dataset)
    )
    # or any torchmetrics metric, on every rank
    accuracy = (predictions.cpu() == labels).float().mean().item()
    if ddpkit.is_main_process():
        print("accuracy:", accuracy)


if __name__ == "__main__":
    main()
