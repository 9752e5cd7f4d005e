"""Count how often a slowed rank is named with the right phase, and how often one that is not; and measure the cost.

One job trains in rounds of 50 steps. In each round one rank, another one each time, is slowed down in one phase, or
none is; after it, rank 0 looks which rank is slow, in the last 40 steps, as the watch does. "stolen" starts a process
that computes on the rank's core all the time; rounds count in which that made the rank's work longer by as much as is
asked for, which depends on the kernel. For the cost, steps with and without the hooks take turns.

    python tests/benchmarks/slow_rank.py [--ranks 2] [--rounds 50] [--slower 0.2] [--width 384]
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import statistics
import time
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddpkit
from ddpkit.job import current_job
from ddpkit.timing import BLOCKS, STEPS, Pace, SlowRank, find_slow_rank

STEPS_A_ROUND = 50
DATA = 0.006  # seconds that a batch takes


def compute(seconds: float) -> None:
    """Keep this process's core busy."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


class Slowed(torch.autograd.Function):
    """The identity, whose backward computes for a while."""

    seconds = 0.0

    @staticmethod
    def forward(ctx: object, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        compute(Slowed.seconds)
        return gradient


class Net(nn.Module):
    """Some layers, whose forward and backward may be slowed down."""

    pause = 0.0

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.rest = nn.Sequential(*(nn.Sequential(nn.ReLU(), nn.Linear(width, width)) for _ in range(5)))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        compute(Net.pause)
        out: torch.Tensor = self.rest(Slowed.apply(self.first(batch)))
        return out


def thief(core: int) -> int:
    """Fork a process that computes on a core all the time; return its number."""
    child = os.fork()
    if child:
        return child
    os.sched_setaffinity(0, [core])
    while True:
        compute(1.0)


def batches(width: int, pauses: dict[str, float]) -> Iterator[torch.Tensor]:
    """Load batches for ever, each in some milliseconds."""
    batch = torch.randn(64, width)

    def collate(_: list[int]) -> torch.Tensor:
        time.sleep(DATA + pauses.get("data", 0.0))
        return batch

    samples = range(1000 * ddpkit.get_world_size())
    loader = ddpkit.make_loader(samples, batch_size=1, collate_fn=collate)
    for _ in itertools.count():
        yield from loader


class Trainer:
    """A small network and its optimizer, which make steps."""

    def __init__(self, width: int) -> None:
        self.pauses: dict[str, float] = {}
        torch.manual_seed(0)
        self.net = ddpkit.wrap_model(Net(width))
        self.optimizer = torch.optim.AdamW(self.net.parameters(), 1e-4)
        self.batches = batches(width, self.pauses)

    def step(self) -> None:
        """Make a step."""
        self.net(next(self.batches)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def round(self, slow: int | None, phase: str, seconds: float) -> tuple[SlowRank | None, list[float]]:
        """Make the steps of a round, in which one rank's phase takes so many seconds longer.

        Returns:
            Who was slow, and the seconds of each rank's own work in a step.
        """
        rank = ddpkit.get_rank()
        mine = seconds if rank == slow else 0.0
        self.pauses["data"] = mine if phase == "data" else 0.0
        Net.pause = mine if phase == "forward" else 0.0
        Slowed.seconds = mine if phase == "backward" else 0.0
        stealer = thief(rank % (os.cpu_count() or 1)) if mine and phase == "stolen" else None
        for _ in range(STEPS_A_ROUND):
            self.step()
        if stealer:
            os.kill(stealer, signal.SIGKILL)
            os.waitpid(stealer, 0)
        clock = current_job.step_clock()
        pace = Pace.of(rank, clock, clock.blocks)
        assert pace is not None
        own = sum(seconds for name, seconds in pace.per_step().items() if name != "waiting")
        return find_slow_rank(ddpkit.all_gather_object(pace)), ddpkit.all_gather_object(own)


def find(rounds: int, slower: float, width: int) -> None:
    """Print, by phase, how often the slowed rank was named rightly."""
    ddpkit.setup()
    os.sched_setaffinity(0, [ddpkit.get_rank() % (os.cpu_count() or 1)])
    trainer = Trainer(width)
    for _ in range(2 * STEPS_A_ROUND):
        trainer.step()
    usual = ddpkit.step_times()
    assert usual is not None
    work = ddpkit.all_reduce_mean(usual.seconds - usual.phases["waiting"])
    say(f"a step takes {1000 * usual.seconds:.1f} ms, of which {1000 * work:.1f} ms are work; {BLOCKS} x {STEPS} steps")
    for phase in ["none", "data", "forward", "backward", "stolen"]:
        right = named = counted = 0
        for number in range(rounds):
            slow = None if phase == "none" else number % ddpkit.get_world_size()
            verdict, own = trainer.round(slow, phase, slower * work)
            if phase == "stolen" and own[slow] < (1 + slower) * statistics.median(own[:slow] + own[slow + 1 :]):
                continue
            counted += 1
            named += verdict is not None and verdict.rank == slow
            phases = ("forward", "backward", "optimizer", "other") if phase == "stolen" else (phase,)
            if phase == "none":
                right += verdict is None
            else:
                right += verdict is not None and verdict.rank == slow and verdict.phase in phases
        say(f"{phase:>8}: {right} of {counted} right" + ("" if phase == "none" else f", the rank in {named}"))


def say(text: str) -> None:
    """Print a line on the main process."""
    if ddpkit.is_main_process():
        print(text, flush=True)


def cost(steps: int) -> None:
    """Print what the hooks add to a step: the difference of the medians of steps that take turns."""
    ddpkit.setup()
    nets = [ddpkit.wrap_model(nn.Linear(64, 64)), DistributedDataParallel(nn.Linear(64, 64))]
    times: list[list[float]] = [[], []]
    for _ in range(steps):
        for which, net in enumerate(nets):
            start = time.perf_counter()
            net(torch.ones(8, 64)).sum().backward()
            times[which].append(time.perf_counter() - start)
    more = statistics.median(times[0]) - statistics.median(times[1])
    say(f"   hooks: {1e6 * more:.0f} microseconds a step")


def main() -> None:
    """Print what was found, and the cost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--slower", type=float, default=0.2, help="of a rank's own work, by which it takes longer")
    parser.add_argument("--width", type=int, default=384, help="of the layers")
    args = parser.parse_args()
    ddpkit.spawn(find, args.ranks, args.rounds, args.slower, args.width)
    ddpkit.spawn(cost, args.ranks, 2000)


if __name__ == "__main__":
    main()
