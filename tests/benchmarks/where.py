"""Measure how long `ddpkit where` takes to hear from all ranks of a job, and how long a step takes while it asks.

The ranks are forked after `import torch` and sit in a collective; every rank's stack is asked for again and again.

    python tests/benchmarks/where.py [--ranks 2 16 64] [--questions 20]
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import statistics
import time
import traceback
from datetime import timedelta

import ddpkit
from ddpkit.errors import LaunchError
from ddpkit.tools.where import ask


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _start(rank: int, ranks: int, port: int) -> int:
    """Fork a rank, which joins and then sleeps."""
    child = os.fork()
    if child:
        return child
    try:
        env = {"RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
        os.environ.update({name: f"{value}" for name, value in env.items()})
        ddpkit.setup(timeout=timedelta(minutes=5))
        time.sleep(1000)
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def measure(ranks: int, questions: int) -> list[float]:
    """Return how long each question took until all ranks had answered."""
    os.environ["RES_OPTIONS"] = "timeout:0 attempts:1"  # torch asks for the name behind each connection
    port = _free_port()
    crew = [_start(rank, ranks, port) for rank in range(ranks)]
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
