"""What StepGuard costs a training step: next to torch's DDP alone, and to `average_gradients`.

The same network is trained by DDP, by DDP in a StepGuard, by `average_gradients`, and plain in a StepGuard, in turn so
that all see the same load; times are medians, of the slowest rank.

    python tests/benchmarks/step_guard.py
    python tests/benchmarks/step_guard.py --width 64 512 --rounds 300
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from timing import make_parser, show, take_turns
from torch import nn

import ddpkit

INPUTS = 32


def make_net(width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(INPUTS, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 4))


def make_step(model: nn.Module, block: AbstractContextManager, x: torch.Tensor, average: bool) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

    def step() -> None:
        optimizer.zero_grad()
        with block:
            model(x).square().mean().backward()
        if average:
            ddpkit.average_gradients(model)
        optimizer.step()

    return step


def measure(width: int, rounds: int) -> dict[str, float]:
    with ddpkit.distributed():
        x = torch.randn(64, INPUTS)
        wrapped, guarded = ddpkit.wrap_model(make_net(width)), ddpkit.wrap_model(make_net(width))
        plain, plain_guarded = make_net(width), make_net(width)
        steps = {
            "DDP": make_step(wrapped, nullcontext(), x, average=False),
            "DDP, guarded": make_step(guarded, ddpkit.StepGuard(guarded), x, average=False),
            "average_gradients": make_step(plain, nullcontext(), x, average=True),
            "plain model, guarded": make_step(plain_guarded, ddpkit.StepGuard(plain_guarded), x, average=False),
        }
        return take_turns(steps, rounds)


def main() -> None:
    parser = make_parser(__doc__, 200, "timed steps of each kind")
    parser.add_argument("--nprocs", type=int, default=2, help="ranks, on this machine, with gloo")
    parser.add_argument("--width", type=int, nargs="+", default=[64, 256, 1024], help="of the hidden layer")
    args = parser.parse_args()
    for width in args.width:
        medians = ddpkit.spawn(measure, args.nprocs, width, args.rounds)[0]
        count = sum(p.numel() for p in make_net(width).parameters())
        show(f"{count:,} parameters, {args.nprocs} ranks", medians, "DDP")


if __name__ == "__main__":
    main()
