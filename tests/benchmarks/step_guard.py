"""What StepGuard costs a training step: next to torch's DDP alone, and to `average_gradients`.

The same network is trained by DDP, by DDP in a StepGuard, by `average_gradients`, and plain in a StepGuard, in turn so
that all see the same load; times are medians, on rank 0.

    python tests/benchmarks/step_guard.py
    python tests/benchmarks/step_guard.py --width 64 512 --rounds 300
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
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
        times: dict[str, list[float]] = {name: [] for name in steps}
        order = random.Random(0)  # the same on every rank
        for _ in range(rounds):
            for name in order.sample(list(steps), len(steps)):
                ddpkit.barrier()
                start = time.perf_counter()
                steps[name]()
                times[name].append(time.perf_counter() - start)
        return {name: statistics.median(taken[10:]) for name, taken in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nprocs", type=int, default=2, help="ranks, on this machine, with gloo")
    parser.add_argument("--width", type=int, nargs="+", default=[64, 256, 1024], help="of the hidden layer")
    parser.add_argument("--rounds", type=int, default=200, help="steps of each kind; the first ten do not count")
    args = parser.parse_args()
    for width in args.width:
        medians = ddpkit.spawn(measure, args.nprocs, width, args.rounds)[0]
        count = sum(p.numel() for p in make_net(width).parameters())
        print(f"{count:,} parameters, {args.nprocs} ranks")
        for name, seconds in medians.items():
            print(f"  {name:22} {seconds * 1e6:9,.0f} µs {seconds / medians['DDP']:6.2f} ×", flush=True)


if __name__ == "__main__":
    main()
