"""Measure how soon the others go on when a rank is killed: `python tests/benchmarks/survival.py --rounds 10`.

Three ranks train a small network; one of them, each in its turn, is killed in the middle of a step. Prints the seconds
from the kill to the end of the next optimizer step of those that are left.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from processes import free_port, platform_env, run

import ddpkit

KILLED_AT = 50  # the number of steps before that in which a rank is killed


def train(folder: str, victim: int) -> None:
    """Train until 20 steps are committed after the loss; write down when steps were."""
    member = int(os.environ["RANK"])
    net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(net.parameters())
    times = []
    for attempt in ddpkit.survive(net, optimizer):
        with attempt:
            wrapped = ddpkit.wrap_model(net)
            while attempt.steps < 70:
                optimizer.zero_grad()
                loss = wrapped(torch.randn(32, 64)).square().mean()
                if member == victim and attempt.steps == KILLED_AT:
                    Path(folder, "killed").write_text(json.dumps(time.time()))
                    os.kill(os.getpid(), signal.SIGKILL)
                loss.backward()
                optimizer.step()
                attempt.commit()
                times.append(time.time())
    Path(folder, f"{member}.json").write_text(json.dumps(times))


def seconds_until_next_step(victim: int) -> float:
    """Let a rank be killed; return how long it took the others until the next step."""
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        run(train, [platform_env(rank, 3, port) for rank in range(3)], folder, victim, timeout=120)
        killed = json.loads(Path(folder, "killed").read_text())
        others = [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]
        return max(times[KILLED_AT] for times in others) - killed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="kills of each rank")
    args = parser.parse_args()
    for victim in range(3):
        seconds = [seconds_until_next_step(victim) for _ in range(args.rounds)]
        print(f"rank {victim} killed: {statistics.median(seconds):.2f} s, at most {max(seconds):.2f} s")


if __name__ == "__main__":
    main()
