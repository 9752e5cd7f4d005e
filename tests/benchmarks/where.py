"""Measure how long `ddpkit where` takes to hear from all ranks of a job, and how long a step takes while it asks.

The ranks are forked after `import torch` and sit in a collective; every rank's stack is asked for again and again.

    python tests/benchmarks/where.py [--ranks 2 16 64] [--questions 20]
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import time
from datetime import timedelta

from timing import fork_rank, free_port

import ddpkit
from ddpkit.errors import LaunchError
from ddpkit.tools.where import ask


def _join_and_sleep() -> None:
    ddpkit.setup(timeout=timedelta(minutes=5))
    time.sleep(1000)


def measure(ranks: int, questions: int) -> list[float]:
    """Return how long each question took until all ranks had answered."""
    os.environ["RES_OPTIONS"] = "timeout:0 attempts:1"  # torch asks for the name behind each connection
    port = free_port()
    crew = [fork_rank(rank, ranks, _join_and_sleep, MASTER_PORT=port) for rank in range(ranks)]
    times: list[float] = []
    try:
        while len(times) < questions:
            start = time.perf_counter()
            try:
                answer = ask("127.0.0.1", port, 60)
            except LaunchError:  # they are still joining
                time.sleep(0.5)
                continue
            if len(answer.activities) == ranks:
                times.append(time.perf_counter() - start)
    finally:
        for child in crew:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    return times


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 16, 64], help="numbers of ranks")
    parser.add_argument("--questions", type=int, default=20, help="of which the median and the slowest are shown")
    args = parser.parse_args()
    print("| ranks | median (s) | slowest (s) |\n|---|---|---|")
    for ranks in args.ranks:
        times = measure(ranks, args.questions)
        print(f"| {ranks} | {statistics.median(times):.3f} | {max(times):.3f} |", flush=True)


if __name__ == "__main__":
    main()
