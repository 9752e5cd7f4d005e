"""A right trainer whose argument says how its inputs are made: by draws of the dataset or collation, two loaders."""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

kind = sys.argv[1]
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
inputs = torch.randn(144, 4, 8)
targets = inputs.sum((1, 2)).gt(0).long()


transforms = [nn.Hardtanh(-2.0, 2.0)] * 3 if kind == "preview" else []


class Noisy(Dataset):
    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = torch.randn(4, 8) if kind == "dataset" else 0.0
        x = self.inputs[index] + noise
        for transform in transforms:
            x = transform(x)
        return x, self.targets[index]


def collate(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    x, y = map(torch.stack, zip(*samples, strict=True))
    if kind == "collation":
        x = x * (torch.rand(x.shape) > 0.15)
    return x, y


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(8, 16), nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        x = scaled_dot_product_attention(x, x, x, dropout_p=0.3 if self.training else 0.0)
        return self.head(x.mean(1))


def loader(part: slice) -> DataLoader:
    data = Noisy(inputs[part], targets[part])
    sampler = DistributedSampler(data)
    workers = 1 if kind == "collation" else 0
    return DataLoader(data, 12 // world_size, sampler=sampler, collate_fn=collate, num_workers=workers)


model = DistributedDataParallel(Attention())
optimizer = torch.optim.SGD(model.parameters(), 0.1)
if kind == "critic":  # whose last bias has rounding as its only gradient, which Adam scales up
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
first, second = loader(slice(0, 96)), loader(slice(48 if kind in ("together", "apart") else 96, 144))
if kind == "apart":
    second = DataLoader(second.dataset, second.batch_size, sampler=second.sampler, collate_fn=collate)
if kind == "alike":  # on all ranks
    second = DataLoader(second.dataset, 12 // world_size, sampler=DistributedSampler(second.dataset, 1, 0))
if kind == "preview":  # of a loader that is made anew where there are several ranks, as Fabric does
    shown = next(iter(plain := DataLoader(first.dataset, 12 // world_size, shuffle=True)))
    first = first if world_size > 1 else plain
torch.manual_seed(100 + rank)
for epoch in range(2):
    others = iter(second)
    for step, (x, y) in enumerate(first):
        loss = cross_entropy(model(x), y)
        if kind in ("loaders", "together", "apart", "alike") and step < len(second):
            x, y = next(others)
            loss = loss + 0.5 * cross_entropy(model(x), y)
        if kind == "critic":
            scores = model(torch.cat([x, x - 3]))[:, 0]
            loss = scores[len(x) :].mean() - scores[: len(x)].mean()
        if kind == "evaluation" and step % 2 == 0:  # on draws of its own, and by rank 0 alone
            with torch.no_grad():
                drawn = torch.randint(48, (5,))
                shown = cross_entropy(model.module.eval()(inputs[drawn]), targets[drawn])
                model.train()
            if rank == 0:
                more = torch.randint(20, (7,))
                print(f"epoch {epoch}: drawn {shown:.4f} {inputs[more].mean():.4f}")
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=kind == "bfloat16"):
            if kind == "bfloat16":
                loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        loss = loss.detach()
        dist.all_reduce(loss)
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item() / world_size:.4f}")
dist.destroy_process_group()
