"""How long one step of training the snakes takes on one core: play, sample, update, in float32 and in bfloat16.

Both take turns in one process, so that they see the same others on the machine. Printed are medians over the turns of
the CPU's time, which other programs disturb less than the clock's, and the episodes per second that follow.

    python tests/benchmarks/snakes_step.py
    python tests/benchmarks/snakes_step.py --opponents greedy --turns 30
"""

from __future__ import annotations

import argparse
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

STEPS = 10  # of all boards, in one turn
PARTS = ("play", "sample", "update")


class Trainer:
    """Train as the trainer does, and count the CPU's seconds of each part."""

    def __init__(self, bfloat16: bool, args: argparse.Namespace) -> None:
        rates = {"a_lr": 3e-3, "c_lr": 3e-3, "gamma": 0.97, "tau": 0.01}
        self.agent = DDPG(torch.device("cpu"), hidden=args.hidden, **rates, bfloat16=bfloat16)
        self.collector = Collector(
            range(args.boards), args.boards, 1, episode_length=200, transitions=65 * 3 * args.boards
        )
        self.players = [OPPONENTS[name] for name in args.opponents]
        self.batch_size = args.batch_size
        self.rng = np.random.default_rng(1)

    def turn(self) -> dict[str, float]:
        """Take some steps; return the seconds of each part in one."""
        seconds = dict.fromkeys(PARTS, 0.0)
        for _ in range(STEPS):
            times = [time.process_time()]
            self.collector.play(self.agent.actor, self.players, 0.1)
            times.append(time.process_time())
            while not self.collector.replay.ready(self.batch_size):
                self.collector.play(self.agent.actor, self.players, 0.1)
            batch = self.collector.replay.sample(self.batch_size, self.rng, torch.device("cpu"))
            times.append(time.process_time())
            self.agent.start_update(batch)
            self.agent.finish_update()
            times.append(time.process_time())
            for part, start, end in zip(PARTS, times, times[1:], strict=False):
                seconds[part] += (end - start) / STEPS
        return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--opponents", nargs="+", default=list(LADDER), help="who plays, each on as many boards")
    parser.add_argument("--boards", type=int, default=1024, help="played at once")
    parser.add_argument("--batch_size", type=int, default=6144, help="rows per optimiser step")
    parser.add_argument("--hidden", type=int, default=128, help="width of the networks")
    parser.add_argument("--turns", type=int, default=15, help="of each kind")
    args = parser.parse_args()
    torch.set_num_threads(1)
    trainers = {"float32": Trainer(False, args), "bfloat16": Trainer(True, args)}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in trainers}
    for number in range(args.turns + 1):
        for name, trainer in trainers.items():
            seconds = trainer.turn()
            if number:  # the first compiles
                found[name].append(seconds)
    print(f"{'ms of CPU per step':<20}{''.join(f'{part:>10}' for part in PARTS)}{'sum':>10}{'episodes/s':>12}")
    for name, turns in found.items():
        medians = [statistics.median(turn[part] for turn in turns) for part in PARTS]
        speed = args.boards / 201 / sum(medians)
        print(f"{name:<20}{''.join(f'{1000 * m:>10.1f}' for m in medians)}{1000 * sum(medians):>10.1f}{speed:>12.0f}")


if __name__ == "__main__":
    main()
