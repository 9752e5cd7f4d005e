"""Fine-tune with a small learning rate for the body, a large one for the head, and no decay of biases."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(14, 28), nn.ReLU(), nn.Linear(28, 14), nn.ReLU())
        self.head = nn.Linear(14, 5)

    def forward(self, x):
        return self.head(self.body(x))


def groups(net):
    for name, parameter in net.named_parameters():
        yield {
            "params": [parameter],
            "lr": 1e-2 if name.startswith("head") else 1e-3,
            "weight_decay": 0.0 if name.endswith("bias") else 1e-2,
        }


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())  # DDP broadcasts the weights of rank 0
    x = torch.randn(96, 14, generator=torch.Generator().manual_seed(0))
    dataset = TensorDataset(x, x[:, :5].argmax(1))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)
    net = Net()
    optimizer = torch.optim.AdamW(groups(net))
    model = DDP(net)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, [g["lr"] for g in optimizer.param_groups], total_steps=2 * len(loader)
    )
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            scheduler.step()
    if dist.get_rank() == 0:
        print(len(optimizer.param_groups), "groups")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
