"""How long one step of training the snakes takes on one core: play, sample, update.

Printed are medians of the CPU's time, which other programs disturb less than the clock's, and the episodes per second
that follow.

    python tests/benchmarks/snakes_step.py
    python tests/benchmarks/snakes_step.py --opponents greedy --steps 300
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "snakes_ddpg"))

from snakes.collector import Collector
from snakes.ddpg import DDPG
from snakes.opponents import LADDER, OPPONENTS

PARTS = ("play", "sample", "update")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--opponents", nargs="+", default=list(LADDER), help="who plays, each on as many boards")
    parser.add_argument("--boards", type=int, default=1024, help="played at once")
    parser.add_argument("--batch_size", type=int, default=6144, help="rows per optimiser step")
    parser.add_argument("--bfloat16", action="store_true", help="for the networks' second layers")
    parser.add_argument("--steps", type=int, default=150, help="of all boards")
    args = parser.parse_args()
    torch.set_num_threads(1)
    cpu = torch.device("cpu")
    agent = DDPG(cpu, hidden=128, a_lr=3e-3, c_lr=3e-3, gamma=0.97, tau=0.01, bfloat16=args.bfloat16)
    collector = Collector(range(args.boards), args.boards, 1, episode_length=200, transitions=65 * 3 * args.boards)
    players = [OPPONENTS[name] for name in args.opponents]
    rng = np.random.default_rng(1)
    while not collector.replay.ready(args.batch_size):
        collector.play(agent.actor, players, 0.1)
    seconds: list[list[float]] = []
    for _ in range(args.steps + 10):
        times = [time.process_time()]
        collector.play(agent.actor, players, 0.1)
        times.append(time.process_time())
        batch = collector.replay.sample(args.batch_size, rng, cpu)
        times.append(time.process_time())
        agent.start_update(batch)
        agent.finish_update()
        times.append(time.process_time())
        seconds.append([end - start for start, end in itertools.pairwise(times)])
    medians = [statistics.median(part) for part in zip(*seconds[10:], strict=True)]  # the first ones compile
    print(f"{'ms of CPU per step':<20}{''.join(f'{part:>10}' for part in PARTS)}{'sum':>10}{'episodes/s':>12}")
    speed = args.boards / 201 / sum(medians)
    print(f"{'':<20}{''.join(f'{1000 * m:>10.1f}' for m in medians)}{1000 * sum(medians):>10.1f}{speed:>12.0f}")


if __name__ == "__main__":
    main()
