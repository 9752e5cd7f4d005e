"""Fine-tune: the backbone is frozen, and each batch takes one of two heads."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(10, 32), nn.ReLU()).requires_grad_(False)
        self.coarse, self.fine = nn.Linear(32, 2), nn.Linear(32, 8)

    def forward(self, x, fine):
        features = self.backbone(x)
        return self.fine(features) if fine else self.coarse(features)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(96, 10)
    dataset = TensorDataset(x, x[:, :8].argmax(1))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)
    model = DDP(TwoHeads(), find_unused_parameters=True)
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trainable, lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for i, (inputs, labels) in enumerate(loader):
            fine = i % 2 == 0
            targets = labels if fine else labels % 2
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs, fine), targets).backward()
            optimizer.step()
    if dist.get_rank() == 0:
        print(sum(p.numel() for p in trainable), "trainable parameters")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
