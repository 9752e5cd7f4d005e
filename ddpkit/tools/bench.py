"""Run `python -m ddpkit bench`: what do collectives cost here?"""

from __future__ import annotations

import argparse
import json
import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from .. import Context, LaunchError, PeerError, __version__, all_reduce, detect_launch, distributed, spawn
from ..job.device import count_accelerators
from ..job.job import checked_device
from ..join.members import usable_cores
from .cli import announce, checked_by, count, positive, positive_seconds, show, table

SCHEMA = 3  # of the JSON object; raised when a key changes its meaning or goes away
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
_SIZES = [1 << 10, 1 << 16, 1 << 20, 1 << 24]
_UNITS = {"GiB": 30, "MiB": 20, "KiB": 10, "B": 0}  # the power of two
_TIMES = {"s": 1, "ms": 1e3, "us": 1e6}  # in a second
_ROUNDS = 8
_FEWEST = 3  # rounds that even a call which uses up its time at once gets
_BUSY = 0.2  # spread above which a time is hardly to be trusted
Row = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add = parser.add_argument
    default_device = "an accelerator for each rank by default, if there are any"
    add("--ranks", type=positive, nargs="+", metavar="N", help="to start, one job each (2 4 8)")
    add("--sizes", type=_bytes, nargs="+", default=_SIZES, metavar="SIZE", help="bytes in collectives, e.g. 16M")
    add("--seconds", type=positive_seconds, default=0.5, metavar="S", help="per measurement, about (0.5)")
    add("--device", type=checked_by(checked_device), help=f'e.g. "cpu"; {default_device}')
    add("--json", action="store_true", help="print one JSON object instead of tables")


def _bytes(text: str) -> int:
    match = re.fullmatch(r"([1-9]\d*)([KMG]?)(?:i?B)?", text, re.IGNORECASE)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text} is no size; write bytes, or 64K, 16M, 1G")
    return int(match[1]) << _UNITS[f"{match[2].upper()}iB" if match[2] else "B"]


def run(args: argparse.Namespace) -> int:
    """Measure and print.

    Returns:
        The exit code: 0 if that went well, 1 if it failed, 2 if it cannot be done as asked.
    """
    rank = 0
    try:
        launch = detect_launch()
        rank = launch.rank
        if launch.kind == "single":
            outcomes = [_spawn(ranks, args) for ranks in _jobs(args)]
        elif args.ranks:
            raise BadFlag("--ranks starts ranks, but a launcher has started these already: leave it out.")
        else:
            outcomes = [measure(args)]
    except (BadFlag, LaunchError, _RankFailed) as error:
        if rank == 0:
            show(f"python -m ddpkit bench: error: {error}", on_stderr=True)
        return 2 if isinstance(error, BadFlag) else 1
    if rank == 0:
        report = make_report(outcomes)
        if args.json:
            print(json.dumps(report, indent=2))
        else:
            show(text(report))
    return 0


class BadFlag(ValueError):
    """A flag asks for something that cannot be measured."""


class _RankFailed(Exception):
    """A rank that bench started raised an exception."""


def _jobs(args: argparse.Namespace) -> list[int]:
    """List the numbers of ranks of the jobs to start."""
    device = checked_device(args.device)
    gpus = count_accelerators() if device is None or device.type != "cpu" else 0
    ranks = sorted(set(args.ranks or default_ranks(gpus or len(usable_cores()))))
    if ranks[0] == 1:
        raise BadFlag("--ranks 1: one rank cannot communicate.")
    return ranks


def default_ranks(most: int) -> list[int]:
    """List powers of two up to the number of accelerators or cores, at most 8 and at least 2, and that number.

    >>> default_ranks(1), default_ranks(6), default_ranks(64)
    ([2], [2, 4, 6], [2, 4, 8])
    """
    powers = {number for number in (2, 4, 8) if number <= most}
    return sorted(powers | {max(2, min(most, 8))})


def _spawn(ranks: int, args: argparse.Namespace) -> Row:
    try:
        outcomes = spawn(measure, ranks, args, timeout=timedelta(days=1))
    except Exception as error:
        cause = error.__cause__
        raise _RankFailed(cause if isinstance(cause, PeerError) else error) from error
    return outcomes[0]


# Time calls that all ranks make together: blocks of calls, in alternating rounds, for a while.


@dataclass(frozen=True)
class Case:
    """One call to measure.

    Attributes:
        labels: Names and sizes that describe it; JSON values.
        call: Does it once, on every rank.
    """

    labels: Row
    call: Callable[[], object]


def time_cases(
    cases: Sequence[Case], seconds: float, device: torch.device, say: Callable[[str], None]
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
        self._time(1)  # allocates, connects; DDP rearranges its buckets after it
        self._quickest = self._time(1)

    def run(self, seconds: float) -> None:
        """Do one round, with as many calls as fit into so many seconds."""
        calls = max(1, int(seconds / self._quickest))
        taken = self._time(calls)
        self.times.append(taken)
        self.used += taken * calls
        self._quickest = min(self._quickest, taken)  # the first call may have been disturbed

    def _time(self, calls: int) -> float:
        """Time one of some calls; equal on every rank, so that all decide alike."""
        self._synchronise()
        all_reduce(0.0, "max")  # all start together
        start = time.perf_counter()
        for _ in range(calls):
            self._call()
        self._synchronise()
        slowest = all_reduce(time.perf_counter() - start, "max")
        return float(slowest) / calls

    def _synchronise(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)


# Make the calls: torch's own collectives.


def measure(args: argparse.Namespace) -> Row:
    """Join the job and measure. Collective.

    Args:
        args: The flags, the same on every rank.

    Returns:
        "results": for each measurement its labels with its "times"; and facts of the job.
    """
    with distributed(device=args.device, num_threads=1) as job:
        cases = [case for size in sorted(set(args.sizes)) for case in _collectives(size, job)]

        def say(step: str) -> None:
            if job.rank == 0:
                announce(f"{count(job.world_size, 'rank')}: {step}")

        times = time_cases(cases, args.seconds, job.device, say)
        results = [case.labels | {"times": taken} for case, taken in zip(cases, times, strict=True)]
        device = "cpu"
        if job.device.type != device:
            device = getattr(torch, job.device.type).get_device_name(job.device)
        facts = {"device": device, "ranks": job.world_size, "nodes": job.num_nodes}
        return {"results": results, **facts, "launcher": job.launcher, "backend": job.backend}


def _collectives(size: int, job: Context) -> Iterator[Case]:
    """Make torch's own collectives, on about so many bytes."""
    floats = size // torch.float32.itemsize // job.world_size
    part = torch.zeros(max(1, floats), device=job.device)
    whole = part.repeat(job.world_size)
    # newer torch has other names for these two, and warns of the former ones
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    calls = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: gather(whole, part),
        "reduce_scatter": lambda: scatter(part, whole),
        "broadcast": lambda: dist.broadcast(whole, 0),
    }
    for name in COLLECTIVES:
        labels = {"name": name, "ranks": job.world_size, "bytes": whole.nbytes}
        yield Case(labels, calls[name])


# Make a report: one dictionary that is printed as JSON or as tables.


def make_report(outcomes: list[Row]) -> Row:
    """Make the report of `measure`'s outcomes, one for each job; docs/guide/troubleshooting.md describes its keys."""
    results = [_result(result) for outcome in outcomes for result in outcome["results"]]
    largest = outcomes[-1]
    return {
        "schema": SCHEMA,
        "ddpkit": __version__,
        "torch": torch.__version__,
        **{key: largest[key] for key in ("launcher", "backend", "device", "nodes")},
        "cores": len(usable_cores()),
        "threads_per_rank": 1,
        "ranks": [outcome["ranks"] for outcome in outcomes],
        "results": results,
        "notes": list(_notes(results)),
    }


def _result(measured: Row) -> Row:
    result = {key: value for key, value in measured.items() if key != "times"} | summary(measured["times"])
    return result | bandwidths(result["name"], result["ranks"], result["bytes"], result["seconds"])


def summary(times: Sequence[float]) -> dict[str, float]:
    """Compute median and quartiles of the rounds' times.

    >>> summary([3.0, 1.0, 2.0, 9.0, 4.0])
    {'seconds': 3.0, 'low': 2.0, 'high': 4.0, 'rounds': 5}
    """
    low, middle, high = np.quantile(times, [0.25, 0.5, 0.75]).tolist()
    return {"seconds": middle, "low": low, "high": high, "rounds": len(times)}


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
    if collective == "broadcast":
        return {"algbw": algbw, "busbw": algbw}
    passes = 2 if collective == "all_reduce" else 1
    return {"algbw": algbw, "busbw": algbw * passes * (ranks - 1) / ranks}


def _notes(results: list[Row]) -> Iterator[str]:
    """Explain doubts in the figures."""
    yield "One CPU thread per rank. Times are those of the slowest rank."
    busy = sum(_spread(result) > _BUSY for result in results)
    if busy:
        yield f"{busy} of {len(results)} measurements vary by more than +-{_BUSY:.0%}: this machine is busy."
        yield "Measure again, with more --seconds."


def text(report: Row) -> str:
    """Write the report as a table and notes."""
    where = f"{report['device']}, {report['backend'] or 'no backend'}, {report['cores']} cores"
    versions = f"ddpkit {report['ddpkit']}, torch {report['torch']}"
    rows = []
    for result in sorted(report["results"], key=lambda result: COLLECTIVES.index(result["name"])):
        row = [result["name"], result["ranks"], _size(result["bytes"]), *_time(result)]
        rows.append([*row, f"{result['algbw']:.3g}", f"{result['busbw']:.3g}"])
    header = ["collective", "ranks", "size", "time", "+-", "algorithm GB/s", "bus GB/s"]
    first = f"{versions}, {where}; ranks started by {report['launcher']}"
    return "\n".join([first, "", *table(header, rows), "", *report["notes"]])


def _spread(result: Row) -> float:
    """Compute half the distance of the quartiles, as a share of the median."""
    return float((result["high"] - result["low"]) / 2 / result["seconds"])


def _time(result: Row) -> list[str]:
    """Write a time in its unit, and its spread."""
    seconds = result["seconds"]
    unit, scale = next((unit, scale) for unit, scale in _TIMES.items() if seconds * scale >= 1 or unit == "us")
    return [f"{seconds * scale:.3g} {unit}", f"{_spread(result):.0%}"]


def _size(size: int) -> str:
    """Write a number of bytes in the largest unit that divides it."""
    unit = next(unit for unit, power in _UNITS.items() if size % (1 << power) == 0)
    return f"{size >> _UNITS[unit]} {unit}"
