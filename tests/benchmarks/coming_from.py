"""How long the trainers of docs/coming_from take on two ranks: to import, and for an epoch.

They take turns, so that all see the same load; a library that is not installed is left out. Times are medians over the
runs, of rank 0: CPU seconds of the process until its `main()` begins, and then CPU and wall-clock seconds per epoch
(100 steps, evaluation and a checkpoint), without the first.

    python tests/benchmarks/coming_from.py
    python tests/benchmarks/coming_from.py --rounds 9
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "coming_from"
TRAINERS = {
    "with_ddpkit": "ddpkit",
    "plain_torch": "torch",
    "with_utils_dist": "torch",
    "with_accelerate": "accelerate",
    "with_fabric": "lightning_fabric",
}
RANK = """
import builtins, json, runpy, sys, time
times, say = [], print
def note(*args, **options):
    if str(args[0]).startswith("epoch "):
        times.append((time.process_time(), time.perf_counter()))
builtins.print = note
main = runpy.run_path(sys.argv[0])["main"]
start = time.process_time()
main(6)
if times:
    say(json.dumps([start, times]))
"""


def measure(name: str, ranks: int) -> list[float]:
    """Run a trainer once; return CPU seconds to import, and CPU and wall-clock seconds per epoch."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    options = ["--dist"] if name == "with_utils_dist" else []
    job = {
        "WORLD_SIZE": f"{ranks}",
        "LOCAL_WORLD_SIZE": f"{ranks}",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": f"{port}",
    }
    job |= {"ACCELERATE_USE_CPU": "true", "LT_CLI_USED": "1", "LT_ACCELERATOR": "cpu", "LT_DEVICES": f"{ranks}"}
    job |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(FOLDER), str(ROOT)])}
    code = f"import sys; sys.argv = {[str(FOLDER / f'{name}.py'), *options]}\n{RANK}"
    with tempfile.TemporaryDirectory() as folder:
        crew = [
            subprocess.Popen(
                [sys.executable, "-W", "ignore", "-c", code],
                env=os.environ | job | {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}"},
                cwd=folder,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]
        outputs = [process.communicate()[0] for process in crew]
    start, times = json.loads(next(line for output in outputs for line in output.splitlines() if line[0] == "["))
    cpu, wall = zip(*times, strict=True)
    epochs = len(times) - 1
    return [start, (cpu[-1] - cpu[0]) / epochs, (wall[-1] - wall[0]) / epochs]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    args = parser.parse_args()
    names = [name for name, package in TRAINERS.items() if importlib.util.find_spec(package)]
    found: dict[str, list[list[float]]] = {name: [] for name in names}
    for _ in range(args.rounds):
        for name in names:
            found[name].append(measure(name, args.ranks))
    print(f"{'trainer':16} import (CPU s)  epoch (CPU s)  epoch (s)")
    for name, runs in found.items():
        start, cpu, wall = (statistics.median(column) for column in zip(*runs, strict=True))
        print(f"{name:16} {start:14.2f} {cpu:14.2f} {wall:10.2f}")


if __name__ == "__main__":
    main()
