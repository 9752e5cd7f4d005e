"""Time calls that all ranks make together: blocks of calls, in alternating rounds, for a while."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...collectives import ops

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
_ROUNDS = 8
_FEWEST = 3  # rounds that even a call which uses up its time at once gets


@dataclass(frozen=True)
class Case:
    """One call to measure.

    Attributes:
        labels: Names and sizes that describe it; JSON values.
        call: Does it once, on every rank.
    """

    labels: dict[str, Any]
    call: Callable[[], object]


def bandwidths(collective: str, ranks: int, size: int, seconds: float) -> dict[str, float]:
    """Compute algorithm and bus bandwidth in GB/s (10⁹ bytes), as nccl-tests define them.

    Args:
        collective: One of `COLLECTIVES`.
        ranks: Number of ranks.
        size: Bytes: of the whole tensor for all_reduce and broadcast, of all ranks' parts for the
            others.
        seconds: Time of one call.

    References:
        https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md

    Example:
        >>> bandwidths("all_reduce", ranks=4, size=10**9, seconds=0.5)
        {'algbw': 2.0, 'busbw': 3.0}
    """
    algbw = size / seconds / 1e9
    return {"algbw": algbw, "busbw": algbw * _bus_factor(collective, ranks)}


def _bus_factor(collective: str, ranks: int) -> float:
    if collective == "broadcast":
        return 1.0
    if collective == "all_reduce":
        return 2 * (ranks - 1) / ranks
    return (ranks - 1) / ranks


def summary(times: Sequence[float]) -> dict[str, float]:
    """Compute median and quartiles of the rounds' times.

    >>> summary([3.0, 1.0, 2.0, 9.0, 4.0])
    {'seconds': 3.0, 'low': 2.0, 'high': 4.0, 'rounds': 5}
    """
    low, middle, high = np.quantile(times, [0.25, 0.5, 0.75]).tolist()
    return {"seconds": middle, "low": low, "high": high, "rounds": len(times)}


def time_cases(
    cases: Sequence[Case],
    seconds: float,
    device: torch.device,
    say: Callable[[str], None],
) -> list[list[float]]:
    """Time one call of each case in each round, in seconds, on the slowest rank. Collective.

    Args:
        cases: The same ones on every rank.
        seconds: About how long to measure each case, after two calls that are not counted. In each
            of eight rounds every case is called as often as fits into its share of the time, in
            another order. A case that needs longer ends after fewer.
        device: Where the work runs; the clock is read when it is done.
        say: Called with the step that begins.

    Returns:
        For each case the times of its rounds.
    """
    say(f"warming up, {len(cases)} measurements")
    timers = [_Timer(case, device) for case in cases]
    for number in range(_ROUNDS):
        say(f"round {number + 1} of {_ROUNDS}")
        order = random.Random(number).sample(timers, len(timers))  # none always follows the same
        for timer in order:
            if number < _FEWEST or timer.used < seconds:
                timer.run(seconds / _ROUNDS)
    return [timer.times for timer in timers]


class _Timer:
    """Times one case, and keeps account of it.

    Attributes:
        times: Seconds for one call, in each round.
        used: Seconds that all rounds took together.
    """

    def __init__(self, case: Case, device: torch.device) -> None:
        self.times: list[float] = []
        self.used = 0.0
        self._call = case.call
        self._device = device
        _time(self._call, 1, device)  # allocates, connects; DDP rearranges its buckets after it
        self._quickest = _time(self._call, 1, device)

    def run(self, seconds: float) -> None:
        """Do one round, with as many calls as fit into so many seconds."""
        calls = max(1, int(seconds / self._quickest))
        taken = _time(self._call, calls, self._device)
        self.times.append(taken)
        self.used += taken * calls
        self._quickest = min(self._quickest, taken)  # the first call may have been disturbed


def _time(call: Callable[[], object], count: int, device: torch.device) -> float:
    """Time one of `count` calls; equal on every rank, so that all decide alike."""
    _synchronise(device)
    ops.all_reduce(0.0, "max")  # all start together
    start = time.perf_counter()
    for _ in range(count):
        call()
    _synchronise(device)
    slowest = ops.all_reduce(time.perf_counter() - start, "max")
    return float(slowest) / count


def _synchronise(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
