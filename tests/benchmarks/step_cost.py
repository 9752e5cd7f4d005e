"""What a job costs a training step of about a millisecond that exchanges nothing: its watch, its loader's clocks.

Each rank trains a small network by itself, in blocks of steps: outside of any job with torch's loader, in a job with
torch's loader, without and with the watch, and in a job with `make_loader`. The blocks take turns. Printed is the CPU
time of a step, of all threads of the process, so that other programs count little: medians of the blocks and ranks.

    python tests/benchmarks/step_cost.py
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterable

import torch
from timing import make_parser
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import ddpkit

STEPS = 200
BATCH = 32


def block(loader: Iterable[list[torch.Tensor]], model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """Train for an epoch; return the seconds of CPU time of a step."""
    start = time.process_time()
    for (x,) in loader:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return (time.process_time() - start) / STEPS


def measure(rounds: int) -> dict[str, float]:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # as in a job
    model = nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 256))
    optimizer = torch.optim.Adam(model.parameters())
    times: dict[str, list[float]] = {}
    for number in range(rounds + 1):
        for name in ("no job", "a job without watch", "a job", "a job and make_loader"):
            job = contextlib.nullcontext()
            if name != "no job":
                job = ddpkit.distributed(watch=name != "a job without watch")
            with job:
                samples = TensorDataset(torch.ones(2 * STEPS * BATCH, 256))
                loader = DataLoader(samples, BATCH, sampler=DistributedSampler(samples, 2, 0))
                if "make_loader" in name:
                    loader = ddpkit.make_loader(samples, batch_size=BATCH)
                taken = block(loader, model, optimizer)
            if number:
                times.setdefault(name, []).append(taken)
    return {name: statistics.median(taken) for name, taken in times.items()}


def main() -> None:
    args = make_parser(__doc__, 15, "blocks of each kind").parse_args()
    found = ddpkit.spawn(measure, 2, args.rounds)
    base = statistics.mean(medians["no job"] for medians in found)
    for name in found[0]:
        seconds = statistics.mean(medians[name] for medians in found)
        print(f"  {name:28} {seconds * 1e6:10,.0f} µs {seconds / base:6.3f} ×")


if __name__ == "__main__":
    main()
