"""Fine-tune a classifier: the head first, and from the second epoch on the backbone too.

facebookresearch/detectron2#2486 unfreezes a part of a model in DDP in the middle of training. DDP leaves out
parameters that need no gradient when it wraps the model, so what is unfrozen later is never averaged.

Mended: The model is wrapped anew when the backbone is unfrozen.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(12, 24), nn.ReLU())
        self.head = nn.Linear(24, 2)
        self.backbone.requires_grad_(False)

    def forward(self, x):
        return self.head(self.backbone(x))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(5)
    x = torch.randn(96, 12)
    data = TensorDataset(x, (x.sum(1) > 0).long())
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)

    model = DistributedDataParallel(Classifier())  # <- gradients-not-averaged
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        if epoch == 1:
            model.module.backbone.requires_grad_(True)
            # mended: model = DistributedDataParallel(model.module)
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
    if dist.get_rank() == 0:
        print("done")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
