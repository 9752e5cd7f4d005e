"""Measure what a checked step costs: `python tests/benchmarks/check_cost.py` trains on two ranks, plain and checked.

Each process times the same script, in turns; a step is the time between two calls of the optimizer. Prints medians.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

SCRIPT = """
import json, os, sys, time
import torch, torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

width, depth, batch = map(int, sys.argv[1:4])
dist.init_process_group("gloo")
torch.manual_seed(0)
layers = []
for _ in range(depth):
    layers += [torch.nn.Linear(width, width), torch.nn.ReLU()]
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers))
optimizer = torch.optim.AdamW(model.parameters())
data = TensorDataset(torch.randn(batch * 2 * 30, width))
loader = DataLoader(data, batch_size=batch, sampler=DistributedSampler(data))
times = []
for (x,) in loader:
    times.append(time.perf_counter())
    loss = (model(x) - x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    steps = [b - a for a, b in zip(times[5:], times[6:])]  # the first ones import, and look at more
    if dist.get_rank() == 0 and len(times) == 25:
        with open(os.environ["OUT"], "w") as file:
            json.dump(steps, file)
"""
PLAIN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
CHECKED = [sys.executable, "-m", "ddpkit", "check", "--steps", "28"]


def median_step(command: list[str], script: Path, sizes: list[int]) -> float:
    """Run the script, and return the median of its steps in seconds."""
    out = script.with_suffix(".json")
    env = {**os.environ, "OUT": str(out), "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, str(script), *map(str, sizes)], env=env, capture_output=True, check=False)
    return statistics.median(json.loads(out.read_text()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each kind")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "train.py")
        script.write_text(SCRIPT)
        for width, depth, batch in ((64, 2, 32), (256, 4, 64), (1024, 4, 64)):
            rounds: dict[str, list[float]] = {"plain": [], "checked": []}
            for _ in range(args.rounds):
                for name, command in (("plain", PLAIN), ("checked", CHECKED)):
                    rounds[name].append(median_step(command, script, [width, depth, batch]))
            plain, checked = (statistics.median(times) for times in rounds.values())
            parameters = depth * (width * width + width)
            times = f"plain {1e3 * plain:.1f} ms, checked {1e3 * checked:.1f} ms"
            print(f"{parameters:>9} parameters: {times}, ratio {checked / plain:.2f}")


if __name__ == "__main__":
    main()
