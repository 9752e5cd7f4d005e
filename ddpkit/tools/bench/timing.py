"""Times what all ranks do together: blocks of calls, in alternating rounds, until the time for each is used up."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...collectives import ops

BUS_FACTORS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
}
_FEWEST = 3  # rounds that even a call which uses up its time at once gets


@dataclass(frozen=True)
class Case:
    """One thing to measure.

    Attributes:
        what: What it is; JSON values.
        call: Does it once, on every rank.
    """

    what: dict[str, Any]
    call: Callable[[], object]


def bandwidths(collective: str, ranks: int, size: int, seconds: float) -> dict[str, float]:
    """Algorithm and bus bandwidth in GB/s (10⁹ bytes), as nccl-tests define them.

    Args:
        collective: A key of `BUS_FACTORS`.
        ranks: Number of ranks.
        size: Bytes: of the whole tensor for all_reduce and broadcast, of all ranks' parts for the others.
        seconds: Time of one call.

    References:
        https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md

    Example:
        >>> bandwidths("all_reduce", ranks=4, size=10**9, seconds=0.5)
        {'algbw': 2.0, 'busbw': 3.0}
    """
    algbw = size / seconds / 1e9
    return {"algbw": algbw, "busbw": algbw * BUS_FACTORS[collective](ranks)}


def summary(times: Sequence[float]) -> dict[str, float]:
    """Median and quartiles of the rounds' times.

    >>> summary([3.0, 1.0, 2.0, 9.0, 4.0])
    {'seconds': 3.0, 'low': 2.0, 'high': 4.0, 'rounds': 5}
    """
    low, middle, high = np.quantile(times, [0.25, 0.5, 0.75]).tolist()
    return {"seconds": middle, "low": low, "high": high, "rounds": len(times)}


def time_cases(
    cases: Sequence[Case], seconds: float, rounds: int, device: torch.device, say: Callable[[str], None]
) -> list[list[float]]:
    """The time of one call of each case in each round, in seconds, on the slowest rank. Collective.

    Args:
        cases: The same ones on every rank.
        seconds: About how long each case is measured, after two calls that are not counted.
        rounds: In each, every case is called as often as fits into its share of the time, in another order. A case that
            needs longer ends after fewer.
        device: Where the work runs; the clock is read when it is done.
        say: Called with what is going on.
    """
    say(f"warming up, {len(cases)} measurements")
    quickest = []
    for case in cases:
        _time(case.call, 1, device)  # allocates, connects; DDP rearranges its buckets after it
        quickest.append(_time(case.call, 1, device))
    times: list[list[float]] = [[] for _ in cases]
    used = [0.0] * len(cases)
    for number in range(rounds):
        say(f"round {number + 1} of {rounds}")
        for i in random.Random(number).sample(range(len(cases)), len(cases)):  # none always follows the same one
            if number < _FEWEST or used[i] < seconds:
                count = max(1, int(seconds / rounds / quickest[i]))
                times[i].append(_time(cases[i].call, count, device))
                quickest[i] = min(quickest[i], times[i][-1])  # the first call may have been disturbed
                used[i] += times[i][-1] * count
    return times


def _time(call: Callable[[], object], count: int, device: torch.device) -> float:
    """Equal on every rank, so that all of them decide alike what comes next."""
    _synchronise(device)
    ops.all_reduce(0.0, "max")  # all start together
    start = time.perf_counter()
    for _ in range(count):
        call()
    _synchronise(device)
    return float(ops.all_reduce(time.perf_counter() - start, "max")) / count


def _synchronise(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
