"""What a training step costs: `wrap_model` next to plain torch DDP, and two small networks in one step.

Two small networks (an actor and a critic, say; each of 75,268 parameters by default) are trained through two DDPs,
through one DDP over both, by `average_gradients`, and without any communication. All ways take turns, so that all see
the same load; times are medians, on rank 0.

    python tests/benchmarks/ddp_step.py
    python tests/benchmarks/ddp_step.py --nprocs 3 --width 64 --rounds 500
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddpkit


def make_net(width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 4))


class Pair(nn.Module):
    """Two networks behind one forward, as one DDP needs them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = make_net(width), make_net(width)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.first(x), self.second(x)


def make_step(forward: Callable, models: list[nn.Module], x: torch.Tensor, average: bool = False) -> Callable[[], None]:
    optimizer = torch.optim.SGD([p for model in models for p in model.parameters()], lr=1e-6)

    def step() -> None:
        optimizer.zero_grad()
        sum(out.square().mean() for out in forward(x)).backward()
        if average:
            ddpkit.average_gradients(*models)
        optimizer.step()

    return step


def make_steps(x: torch.Tensor, width: int) -> dict[str, Callable[[], None]]:
    """The ways to make one step; a model's wrapper lives as long as its closure."""

    def single(model: nn.Module) -> Callable[[], None]:
        return make_step(lambda x: (model(x),), [model], x)

    def both(models: list[nn.Module], average: bool = False) -> Callable[[], None]:
        return make_step(lambda x: [model(x) for model in models], models, x, average)

    pair = DistributedDataParallel(Pair(width))
    return {
        "one net: torch DDP": single(DistributedDataParallel(make_net(width))),
        "one net: wrap_model": single(ddpkit.wrap_model(make_net(width))),
        "two nets: two DDPs": both([DistributedDataParallel(make_net(width)) for _ in range(2)]),
        "two nets: one DDP": make_step(pair, [pair], x),
        "two nets: average_gradients": both([make_net(width), make_net(width)], average=True),
        "two nets: no communication": both([make_net(width), make_net(width)]),
    }


def measure(width: int, batch_size: int, rounds: int) -> dict[str, float]:
    with ddpkit.distributed(num_threads=1) as ctx:
        steps = make_steps(torch.randn(batch_size, 32, device=ctx.device), width)
        times: dict[str, list[float]] = {name: [] for name in steps}
        for i in range(rounds + 10):
            for name in random.Random(i).sample(list(steps), len(steps)):  # no way always follows the same one
                ddpkit.barrier()
                start = time.perf_counter()
                steps[name]()
                if i >= 10:  # DDP rebuilds its buckets in the first steps
                    times[name].append(time.perf_counter() - start)
    return {name: statistics.median(each) for name, each in times.items()}


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=256, help="units in each of a network's two hidden layers")
    parser.add_argument("--batch-size", type=int, default=64, help="samples per step, per rank")
    parser.add_argument("--rounds", type=int, default=200, help="timed steps of each way")
    parser.add_argument("--nprocs", type=int, default=2, help="ranks")
    args = parser.parse_args()
    times = ddpkit.spawn(measure, args.nprocs, args.width, args.batch_size, args.rounds)[0]
    size = sum(p.numel() for p in make_net(args.width).parameters())
    print(f"{args.nprocs} ranks, {size} parameters per net, {args.batch_size} samples per step per rank")
    for name, seconds in times.items():
        base = times["one net: torch DDP" if name.startswith("one") else "two nets: two DDPs"]
        print(f"{name:<28} {1e3 * seconds:7.2f} ms   {seconds / base:5.2f} x")


if __name__ == "__main__":
    main()
