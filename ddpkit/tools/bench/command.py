"""Run `python -m ddpkit bench`: the cost of communication here, and the gain of more ranks."""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch

from ... import LaunchError, PeerError, detect_launch, spawn
from ...job.device import count_accelerators
from ...job.job import checked_device
from ...join.members import usable_cores
from . import results
from .measure import PARTS, BadFlag, Plan, measure

_SIZES = ["1K", "64K", "1M", "16M"]
_UNITS = {"": 0, "K": 10, "M": 20, "G": 30}  # the power of two


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add = parser.add_argument
    some_parts = f"{' or '.join(PARTS)}"
    default_device = "an accelerator for each rank by default, if there are any"
    add("--ranks", type=int, nargs="+", metavar="N", help="to start, one job each (1 2 4 8)")
    add("--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=some_parts)
    add("--batch-size", type=int, default=64, metavar="N", help="samples, per rank or in all (64)")
    add("--sizes", nargs="+", default=_SIZES, metavar="SIZE", help="bytes in collectives, e.g. 16M")
    add("--seconds", type=float, default=0.5, metavar="S", help="per measurement, about (0.5)")
    add("--device", help=f'e.g. "cpu"; {default_device}')
    add("--json", action="store_true", help="print one JSON object instead of tables")


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
            report = _start_jobs(args)
        else:
            report = _measure_job(args, launch.world_size)
    except BadFlag as error:
        _print_error(rank, error)
        return 2
    except (LaunchError, _RankFailed) as error:
        _print_error(rank, error)
        return 1
    if rank == 0:
        print(json.dumps(report, indent=2) if args.json else results.text(report))
    return 0


def _print_error(rank: int, error: Exception) -> None:
    if rank == 0:
        print(f"python -m ddpkit bench: error: {error}", file=sys.stderr)


class _RankFailed(Exception):
    """A rank that bench started raised an exception."""


def _measure_job(args: argparse.Namespace, world_size: int) -> dict[str, Any]:
    """Measure the job to which this rank belongs. Collective."""
    if args.ranks:
        started = "but a launcher has started these already"
        raise BadFlag(f"--ranks starts ranks, {started}: leave it out.")
    _parse_device(args.device)  # setup() checks on every rank that it has one
    plan = _plan(args, [world_size])
    return results.make_report(plan, [measure(plan)])


def _start_jobs(args: argparse.Namespace) -> dict[str, Any]:
    """Start a job for each number of ranks, and measure it."""
    device = _parse_device(args.device)
    gpus = count_accelerators() if device is None or device.type != "cpu" else 0
    asked = args.ranks or default_ranks(gpus, len(usable_cores()))
    ranks = sorted(set(asked))
    plan = _plan(args, ranks)
    if "steps" not in plan.parts:
        if ranks == [1]:
            raise BadFlag("--ranks 1: collectives: only with 2 ranks or more.")
        ranks = [n for n in ranks if n > 1]
    outcomes = [_spawn(n, part) for n, part in _jobs(ranks, plan)]
    return results.make_report(plan, outcomes)


def _jobs(ranks: list[int], plan: Plan) -> list[tuple[int, Plan]]:
    """Order the jobs there and back, so that a load which slowly changes cancels out.

    The job with the most ranks runs once, all others twice in half of the time.
    """
    *fewer, most = ranks
    half = replace(plan, seconds=plan.seconds / 2)
    there = [(n, half) for n in fewer]
    return [*there, (most, plan), *reversed(there)]


def _spawn(ranks: int, plan: Plan) -> dict[str, Any]:
    try:
        outcomes = spawn(measure, ranks, plan, timeout=timedelta(days=1))
    except Exception as error:
        cause = error.__cause__
        raise _RankFailed(cause if isinstance(cause, PeerError) else error) from error
    return outcomes[0]


def _parse_device(asked: str | None) -> torch.device | None:
    try:
        return checked_device(asked)
    except ValueError as error:
        raise BadFlag(f"--device {asked}: {error}") from None


def default_ranks(gpus: int, cores: int) -> list[int]:
    """List powers of two up to the number of devices, at most 8, and the number of accelerators.

    >>> default_ranks(0, cores=6), default_ranks(0, cores=1)
    ([1, 2, 4], [1, 2])
    >>> default_ranks(6, cores=64), default_ranks(1, cores=64)
    ([1, 2, 4, 6], [1])
    """
    most = gpus or max(2, cores)  # one rank has nobody to talk to
    powers = {n for n in (1, 2, 4, 8) if n <= most}
    return sorted(powers | {gpus or 1})


def _plan(args: argparse.Namespace, ranks: list[int]) -> Plan:
    """Check the flags that every job needs."""
    if ranks[0] < 1:
        raise BadFlag(f"--ranks {ranks[0]}: a job has at least 1 rank.")
    for name in ("batch_size", "seconds"):
        value = getattr(args, name)
        if not 0 < value < math.inf:
            raise BadFlag(f"--{name.replace('_', '-')} {value}: must be positive and finite.")
    if args.batch_size < ranks[-1]:
        few = f"strong scaling divides it among {ranks[-1]} ranks, so it needs as many samples"
        raise BadFlag(f"--batch-size {args.batch_size}: {few}.")
    return Plan(
        parts=tuple(part for part in PARTS if part in args.only),
        sizes=tuple(sorted({_parse_size(text) for text in args.sizes})),
        batch_size=args.batch_size,
        seconds=args.seconds,
        device=args.device,
    )


def _parse_size(text: str) -> int:
    match = re.fullmatch(r"(\d+)([KMG]?)(?:i?B)?", text, re.IGNORECASE)
    if not match or int(match[1]) == 0:
        raise BadFlag(f"--sizes {text}: not a size; write bytes, or 64K, 16M, 1G.")
    return int(match[1]) << _UNITS[match[2].upper()]
