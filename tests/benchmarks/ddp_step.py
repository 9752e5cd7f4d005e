"""What a training step costs: `wrap_model` next to plain torch DDP, and two small networks in one step.

Two small networks (an actor and a critic, say; each of 75,268 parameters by default) are trained through two DDPs,
through one DDP over both, by `average_gradients`, and without any communication. All ways take turns, so that all see
the same load; times are medians, of the slowest rank.

    python tests/benchmarks/ddp_step.py
    python tests/benchmarks/ddp_step.py --nprocs 3 --width 64 --rounds 500
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from timing import make_parser, show, take_turns
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
        return take_turns(steps, rounds)  # DDP rebuilds its buckets in the first ones


def main() -> None:
    """Measures and prints a table."""
    parser = make_parser(__doc__, 200, "timed steps of each way")
    parser.add_argument("--width", type=int, default=256, help="units in each of a network's two hidden layers")
    parser.add_argument("--batch-size", type=int, default=64, help="samples per step, per rank")
    parser.add_argument("--nprocs", type=int, default=2, help="ranks")
    args = parser.parse_args()
    times = ddpkit.spawn(measure, args.nprocs, args.width, args.batch_size, args.rounds)[0]
    size = sum(p.numel() for p in make_net(args.width).parameters())
    print(f"{args.nprocs} ranks, {size} parameters per net, {args.batch_size} samples per step per rank")
    for nets, base in {"one net": "torch DDP", "two nets": "two DDPs"}.items():
        show(nets, {name.partition(": ")[2]: each for name, each in times.items() if name.startswith(nets)}, base)


if __name__ == "__main__":
    main()
