"""`python -m ddpkit bench`: what communication costs here, and what more ranks bring. Flags in, a report out."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from ...errors import LaunchError, PeerError
from ...launch.launchers import detect_launch
from ...spawning.spawn import spawn
from . import measure, results, workloads
from .workloads import PARTS, BadFlag, Plan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags."""
    add = parser.add_argument
    add("--ranks", type=int, nargs="+", metavar="N", help="to start, one job each (1 2 4 8, as there are devices)")
    add("--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=f"some of {', '.join(PARTS)}")
    known = ", ".join(workloads.BUILT_IN)
    add("--model", nargs="+", default=[*workloads.BUILT_IN], help=f"{known}, package:function or file.py:function")
    add("--batch-size", type=int, default=64, metavar="N", help="samples per step, per rank or in all (64)")
    add("--sizes", nargs="+", default=["1K", "64K", "1M", "16M"], metavar="SIZE", help="bytes in collectives, e.g. 16M")
    add("--seconds", type=float, default=0.5, metavar="S", help="per measurement, about (0.5)")
    add("--rounds", type=int, default=8, metavar="N", help="in which all measurements take turns (8)")
    add("--device", help='e.g. "cpu"; an accelerator for each rank by default, if there are any')
    add("--json", action="store_true", help="print one JSON object instead of tables")
    add("--plot", type=Path, metavar="FILE.png", help="also draw bus bandwidths and speed-ups; needs matplotlib")


def run(args: argparse.Namespace) -> int:
    """Measures and prints; 0 if that went well, 1 if it failed, 2 if it cannot be done as asked."""
    rank = 0
    try:
        launch = detect_launch()
        rank = launch.rank
        alone = launch.kind == "single"
        report = _start_ranks(args) if alone else _measure_job(args, launch.rank, launch.world_size)
    except (BadFlag, LaunchError, _RankFailed) as error:
        if rank == 0:
            print(f"python -m ddpkit bench: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, BadFlag) else 1
    if rank == 0:
        print(json.dumps(report, indent=2) if args.json else results.text(report))
        if args.plot:
            results.plot(report, args.plot)
    return 0


class _RankFailed(Exception):
    """A rank that bench started raised an exception."""


def _measure_job(args: argparse.Namespace, rank: int, world_size: int) -> dict[str, Any]:
    if args.ranks:
        raise BadFlag("--ranks starts ranks, but a launcher has started these already: leave it out.")
    _device(args.device)  # whether every rank has one is asked in setup(), so that all of them hear the answer
    plan = _plan(args, [world_size])
    problem = ""
    if rank == 0 and args.plot:
        try:
            results.check_plot(args.plot)
        except BadFlag as error:
            problem = str(error)
    return results.assemble(plan, [measure.measure(plan, problem)])


def _start_ranks(args: argparse.Namespace) -> dict[str, Any]:
    """Starts a job for each number of ranks, there and back again, so that a load that slowly changes cancels out."""
    gpus = _accelerators(args.device)
    ranks = sorted(set(args.ranks or default_ranks(gpus, len(os.sched_getaffinity(0)))))
    plan = _plan(args, ranks)
    if 0 < gpus < ranks[-1]:
        raise BadFlag(f"--ranks {ranks[-1]}: {gpus} accelerators here, one per rank; or measure with --device cpu.")
    if ranks == [1] and not plan.models:
        raise BadFlag(f"--ranks 1: {', '.join(plan.parts)}: only with 2 ranks or more.")
    with redirect_stdout(sys.stderr):
        for name in plan.models:
            workloads.build(name)
    if args.plot:
        results.check_plot(args.plot)
    plan = replace(plan, dp=gpus > 1 and {1, gpus} <= set(ranks))
    jobs = [n for n in ranks if n > 1 or plan.models]
    there, back = jobs[:-1], jobs[-2::-1] if plan.rounds > 1 else []
    half = replace(plan, rounds=math.ceil(plan.rounds / 2), seconds=plan.seconds / 2) if back else plan
    visits = [(n, half) for n in there] + [(jobs[-1], plan)] + [(n, half) for n in back]
    return results.assemble(plan, [_spawned(n, part) for n, part in visits])


def _spawned(ranks: int, plan: Plan) -> dict[str, Any]:
    try:
        outcome: dict[str, Any] = spawn(measure.measure, ranks, plan, timeout=timedelta(days=1))[0]
        return outcome
    except BadFlag:
        raise
    except Exception as error:
        raise _RankFailed(error.__cause__ if isinstance(error.__cause__, PeerError) else error) from error


def _device(asked: str | None) -> torch.device | None:
    try:
        return torch.device(asked) if asked else None
    except RuntimeError:
        raise BadFlag(f'--device {asked}: torch knows no such device; try "cpu" or "cuda".') from None


def _accelerators(asked: str | None) -> int:
    """How many there are, one for each rank; 0 where ranks use the CPU, or share an accelerator that was named."""
    device = _device(asked)
    here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if device and device.type != "cpu" and (here is None or here.type != device.type):
        raise BadFlag(f"--device {asked}: there is no such accelerator here{f', but {here.type}' if here else ''}.")
    if device and (device.type == "cpu" or device.index is not None):
        return 0
    return torch.accelerator.device_count() if here else 0


def default_ranks(gpus: int, cores: int) -> list[int]:
    """Powers of two up to the number of devices, at most 8, and the number of accelerators.

    >>> default_ranks(0, cores=6), default_ranks(0, cores=1), default_ranks(6, cores=64), default_ranks(1, cores=64)
    ([1, 2, 4], [1, 2], [1, 2, 4, 6], [1])
    """
    most = gpus or max(2, cores)  # one rank has nobody to talk to
    return sorted({n for n in (1, 2, 4, 8) if n <= most} | {gpus or 1})


def _plan(args: argparse.Namespace, ranks: list[int]) -> Plan:
    if ranks[0] < 1:
        raise BadFlag(f"--ranks {ranks[0]}: a job has at least 1 rank.")
    for name in ("batch_size", "rounds", "seconds"):
        if not 0 < getattr(args, name) < math.inf:
            raise BadFlag(f"--{name.replace('_', '-')} {getattr(args, name)}: must be positive and finite.")
    if args.batch_size < ranks[-1]:
        few = f"strong scaling divides it among {ranks[-1]} ranks, so it needs as many samples"
        raise BadFlag(f"--batch-size {args.batch_size}: {few}.")
    parts = tuple(part for part in PARTS if part in args.only)
    models = tuple(dict.fromkeys(args.model)) if "steps" in parts else ()
    sizes = tuple(sorted({_bytes(text) for text in args.sizes}))
    return Plan(parts, sizes, models, args.batch_size, args.seconds, args.rounds, args.device, dp=False)


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+)([KMG]?)(?:i?B)?", text, re.IGNORECASE)
    if not match or int(match[1]) == 0:
        raise BadFlag(f"--sizes {text}: not a size; write bytes, or 64K, 16M, 1G.")
    return int(match[1]) << 10 * " KMG".index(match[2].upper() or " ")
