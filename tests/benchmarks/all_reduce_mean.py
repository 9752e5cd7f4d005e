"""What `all_reduce_mean` costs next to plain torch, on ranks of this machine.

Averages a dict of Python floats in three ways, in turn so that all see the same load, and prints the median time of
each: by hand (one tensor, one all-reduce, nothing checked), by `all_reduce_mean`, and one all-reduce for each value.

    python tests/benchmarks/all_reduce_mean.py
    python tests/benchmarks/all_reduce_mean.py --values 100 --nprocs 4
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

import ddpkit

Metrics = dict[str, float]


def by_hand(metrics: Metrics) -> Metrics:
    flat = torch.tensor(list(metrics.values()), dtype=torch.float64)
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    return dict(zip(metrics, flat.tolist(), strict=True))


def one_by_one(metrics: Metrics) -> Metrics:
    means = {}
    for name, value in metrics.items():
        single = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(single)
        means[name] = single.item() / dist.get_world_size()
    return means


WAYS: dict[str, Callable[[Metrics], Metrics]] = {
    "by hand": by_hand,
    "all_reduce_mean": ddpkit.all_reduce_mean,
    "one by one": one_by_one,
}


def measure(values: int, rounds: int) -> dict[str, float]:
    with ddpkit.distributed() as ctx:
        metrics = {f"metric_{i}": float(i + ctx.rank) for i in range(values)}
        times: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(rounds):
            for way, average in WAYS.items():
                dist.barrier()
                start = time.perf_counter()
                average(metrics)
                times[way].append(time.perf_counter() - start)
        return {way: statistics.median(taken[rounds // 10 :]) for way, taken in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--values", type=int, default=32, help="Python floats in the dict")
    parser.add_argument("--nprocs", type=int, default=2, help="ranks, on this machine, with gloo")
    parser.add_argument("--rounds", type=int, default=1000, help="calls of each way; the first tenth is not counted")
    args = parser.parse_args()
    medians = ddpkit.spawn(measure, args.nprocs, args.values, args.rounds)[0]
    for way, seconds in medians.items():
        print(f"{way:16} {seconds * 1e6:8.0f} µs {seconds / medians['by hand']:6.2f} ×")


if __name__ == "__main__":
    main()
