"""What saving a checkpoint costs next to plain torch, and for how long a step waits if `save()` does not.

Saves a model and its Adam state in three ways, in turn so that all see the same load, and prints the median times: by
hand (rank 0 calls `torch.save` and `fsync`, and then deletes the file before it), `save()`, and `save(wait=False)`: the
time until it returns, and until the file is there. The first round does not count.

    python tests/benchmarks/checkpoint_saving.py
    python tests/benchmarks/checkpoint_saving.py --nprocs 2 --megabytes 100
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ddpkit

WAYS = ("by hand", "save", "without waiting: blocked", "without waiting: in all")
WIDTH = 1024


def make_state(megabytes: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Make a model and Adam's state of about this size together: three numbers of 4 bytes for each parameter."""
    layers = max(1, round(megabytes * 1e6 / (12 * WIDTH**2)))
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)])
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def save_by_hand(folder: Path, step: int, state: dict[str, Any]) -> None:
    if ddpkit.is_main_process():
        path = folder / f"{step}.pt"
        torch.save({name: value.state_dict() for name, value in state.items()}, path)
        with open(path, "rb") as file:
            os.fsync(file.fileno())
        (folder / f"{step - 1}.pt").unlink(missing_ok=True)  # only now
    ddpkit.barrier()


def bytes_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    tensors = list(model.parameters())
    for values in optimizer.state.values():
        tensors += [value for value in values.values() if isinstance(value, torch.Tensor)]
    return sum(tensor.nbytes for tensor in tensors)


def measure(folder: str, megabytes: float, rounds: int) -> tuple[dict[str, list[float]], int]:
    with ddpkit.distributed():
        torch.manual_seed(0)
        model, optimizer = make_state(megabytes)
        state = {"model": model, "optimizer": optimizer}
        times: dict[str, list[float]] = {way: [] for way in WAYS}
        waiting = ddpkit.Checkpointer(Path(folder, "waiting"), keep=1)
        later = ddpkit.Checkpointer(Path(folder, "later"), keep=1)

        def clock(way: str, fn: Callable[[], Any], start: float | None = None) -> float:
            if start is None:
                ddpkit.barrier()
                start = time.perf_counter()
            fn()
            times[way].append(time.perf_counter() - start)
            return start

        for step in range(rounds):
            clock("by hand", lambda step=step: save_by_hand(Path(folder), step, state))
            clock("save", lambda step=step: waiting.save(step, **state))
            start = clock("without waiting: blocked", lambda step=step: later.save(step, **state, wait=False))
            clock("without waiting: in all", later.wait, start)
        return times, bytes_of(model, optimizer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=500, help="size of the state, in MB")
    parser.add_argument("--nprocs", type=int, default=1, help="ranks, on this machine")
    parser.add_argument("--rounds", type=int, default=6, help="saves of each kind; the first does not count")
    parser.add_argument("--folder", type=Path, help="on the disk to measure; by default the temporary folder")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        times, size = ddpkit.spawn(measure, args.nprocs, folder, args.megabytes, args.rounds)[0]
    print(f"{size / 1e6:.0f} MB of state, {args.nprocs} ranks")
    waiting = statistics.median(times["save"][1:])
    by_hand = statistics.median(times["by hand"][1:])
    for way, taken in times.items():
        median = statistics.median(taken[1:])
        shown = " ".join(f"{seconds:.2f}" for seconds in taken)
        ratios = f"{median / by_hand:5.2f} × by hand, {median / waiting:5.2f} × save"
        print(f"{way:26} {median:7.3f} s, {ratios} (all: {shown})")


if __name__ == "__main__":
    main()
