"""What the benchmarks share: their command line, and ways to do one thing that take turns under the same load."""

from __future__ import annotations

import argparse
import os
import random
import socket
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch

import ddpkit


def make_parser(about: str | None, rounds: int, of: str) -> argparse.ArgumentParser:
    """Make a parser that shows the benchmark's own text; `rounds` by default, whose help is `of`."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=rounds, help=of)
    return parser


def free_port() -> int:
    """Return a port of this machine that nobody uses."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def fork_rank(rank: int, ranks: int, work: Callable[[], Any], **more: int) -> int:
    """Fork a rank of this machine, with a launcher's variables, which does its work and ends; return its process."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        place = {"RANK": rank, "WORLD_SIZE": ranks, "OMP_NUM_THREADS": 1, **more}
        os.environ.update({name: f"{value}" for name, value in place.items()}, MASTER_ADDR="127.0.0.1")
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def take_turns(
    ways: dict[str, Callable[[], Any]], rounds: int, warm_up: int = 10, in_a_row: int = 1
) -> dict[str, float]:
    """Call each way `rounds` times, none always after the same one, on all ranks at once.

    Args:
        ways: What to compare, by name.
        rounds: How often.
        warm_up: The first rounds, which do not count.
        in_a_row: Calls between two barriers.

    Returns:
        The medians, in seconds a call, of what the slowest rank needs.
    """
    times: dict[str, list[float]] = {way: [] for way in ways}
    order = random.Random(0)  # the same on every rank
    for _ in range(rounds + warm_up):
        for way in order.sample(list(ways), len(ways)):
            ddpkit.barrier()
            start = time.perf_counter()
            for _ in range(in_a_row):
                ways[way]()
            times[way].append((time.perf_counter() - start) / in_a_row)
    slowest = ddpkit.all_reduce({way: torch.tensor(taken[warm_up:]) for way, taken in times.items()}, "max")
    return {way: statistics.median(taken.tolist()) for way, taken in slowest.items()}


def show(title: str, medians: dict[str, float], base: str) -> None:
    """Print the medians, and how often that of `base` fits in."""
    print(title)
    for way, seconds in medians.items():
        print(f"  {way:28} {seconds * 1e6:10,.0f} µs {seconds / medians[base]:6.2f} ×", flush=True)
