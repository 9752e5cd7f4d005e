"""A trainer that keeps more than a network; its argument says what, the second part of it with a mistake."""

import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, SequentialSampler

kind = sys.argv[1]
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)


@dataclass
class Sample:
    """A sample of a class that only this script knows."""

    x: Tensor
    label: int


def collate(samples: list[Sample]) -> dict[str, Tensor]:
    labels = torch.tensor([sample.label for sample in samples])
    return {"x": torch.stack([sample.x for sample in samples]), "labels": labels}


class Contrast(nn.Module):
    """Two encoders, of which the second follows the first within `forward`, and a queue of its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = nn.Linear(4, 8), nn.Linear(8, 3)
        self.slow = copy.deepcopy(self.encoder).requires_grad_(False)
        self.register_buffer("mask", torch.full((3, 3), float("-inf")).triu(1))
        self.register_buffer("queue", normalize(torch.randn(48, 8)))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        with torch.no_grad():
            for slow, fast in zip(self.slow.parameters(), self.encoder.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
            keys = normalize(self.slow(x))
        found = normalize(self.encoder(x))
        near, far = (found * keys).sum(1, keepdim=True), found @ self.queue.clone().T
        loss = cross_entropy(torch.cat([near, far], 1), torch.zeros(len(x), dtype=torch.long))
        gathered = [torch.empty_like(keys) for _ in range(world_size)]
        dist.all_gather(gathered, keys)
        self.queue = torch.cat([*gathered, self.queue])[:48]
        return loss + cross_entropy(self.head(found), labels)


class Average:
    """A moving average, which an object keeps that another object keeps."""

    def __init__(self, model: nn.Module) -> None:
        self.model = copy.deepcopy(model)

    @torch.no_grad()
    def update(self, model: nn.Module, weight: float) -> None:
        for mine, other in zip(self.model.parameters(), model.parameters(), strict=True):
            mine.lerp_(other, weight)


def call(network: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Call a network, whose parameters have another name here than where the optimizer steps."""
    return network(**batch)


class Wrapper(torch.optim.Optimizer):
    """An optimizer that steps by another one, and clears the gradients, as implementations of SAM do."""

    def __init__(self, parameters: list[Tensor]) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1)

    def step(self, closure: Callable[[], Tensor]) -> Tensor:
        loss = closure()
        self.base.step()
        self.zero_grad()
        return loss


class Trainer:
    def __init__(self) -> None:
        network = Contrast()
        self.model = DistributedDataParallel(network, broadcast_buffers=False)
        self.network, self.first = network, copy.deepcopy(network)
        self.averages = [Average(network)]
        known = [*network.parameters()]
        if kind == "fewer" and rank == 1:
            known = [parameter for parameter in known if parameter.dim() > 1]
        self.optimizer = torch.optim.SGD(known, lr=0.1, momentum=0.9)
        if kind == "wrapper":
            self.optimizer = Wrapper(known)

    def train(self, loader: DataLoader) -> None:
        for step, batch in enumerate(loader):
            if kind in ("closure", "wrapper"):
                self.optimizer.step(lambda batch=batch: self.backward(batch))
            else:
                self.backward(batch)
                self.optimizer.step()
            if kind == "rate" and rank == 1 and step == 2:
                self.optimizer.param_groups[0]["lr"] = 0.05
            if kind != "first" or rank == 0:
                self.averages[0].update(self.model.module, 0.1 * world_size if kind == "average" else 0.1)

    def backward(self, batch: dict[str, Tensor]) -> Tensor:
        self.optimizer.zero_grad()
        loss = call(self.model, batch)
        loss.backward()
        return loss


samples = [Sample(torch.randn(4), number % 3) for number in range(96)]
sampler = SequentialSampler(samples) if kind == "same" else DistributedSampler(samples)
Trainer().train(DataLoader(samples, 12 // world_size, sampler=sampler, collate_fn=collate))
dist.destroy_process_group()
