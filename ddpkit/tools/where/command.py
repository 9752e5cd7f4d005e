"""Run `python -m ddpkit where`: what is each rank of a running job doing, and for how long?"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from dataclasses import asdict

from ...errors import LaunchError
from ...watch.messages import fold
from ..terminal import count
from .asking import Answer, ask
from .finding import jobs_here
from .steps import describe_steps


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add = parser.add_argument
    jobs = "its MASTER_ADDR:MASTER_PORT, which rank 0 logs when it has joined (default: the job on this machine)"
    add("--job", type=_address, metavar="HOST:PORT", help=jobs)
    add("--timeout", type=_seconds, default=2.0, metavar="SECONDS", help="bound on the ranks' answers (default 2)")
    add("--json", action="store_true", help="print one JSON object to stdout and nothing else")


def run(args: argparse.Namespace) -> int:
    """Ask, and print the answers; return 1 if a rank has not answered, or there is no job, else 0."""
    try:
        address, port = args.job or _only_job()
        answer = ask(address, port, args.timeout)
    except LaunchError as error:
        print(f"ddpkit where: {error}", file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps(_as_json(answer)))
    else:
        ranks = count(answer.members.world_size, "rank")
        nodes = count(len(answer.members.nodes), "node")
        print(f"{ranks} on {nodes}, at {time.strftime('%H:%M:%S')}, job {address}:{port}")
        lines = [*fold(answer.activities, answer.members.world_size), *describe_steps(answer.paces)]
        print("\n".join(lines))
    return int(len(answer.activities) < answer.members.world_size)


def _only_job() -> tuple[str, int]:
    """Return the address of the job that the environment names, else of the only one with ranks on this machine."""
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    if address and port.isdigit():
        return address, int(port)
    jobs = jobs_here()
    if len(jobs) == 1:
        return jobs[0]
    which = "--job HOST:PORT takes the master that rank 0 logs when it has joined"
    if not jobs:
        raise LaunchError(f"No process here shows in its environment that it is a rank; {which}.")
    found = ", ".join(f"{address}:{port}" for address, port in jobs)
    raise LaunchError(f"Ranks of several jobs run here: choose one with --job, {found}.")


def _as_json(answer: Answer) -> dict[str, object]:
    ranks = [asdict(each) for each in sorted(answer.activities, key=lambda each: each.rank)]
    steps = {pace.rank: pace.per_step() for pace in answer.paces}
    return {"world_size": answer.members.world_size, "ranks": ranks, "seconds_per_step": steps}


def _address(text: str) -> tuple[str, int]:
    found = re.fullmatch(r"\[?(\S+?)\]?:(\d{1,5})", text)
    if found is None or int(found[2]) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT")
    return found[1], int(found[2])


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number of seconds")
    return seconds
