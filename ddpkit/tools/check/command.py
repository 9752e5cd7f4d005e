"""Run `python -m ddpkit check train.py`: find the silent bugs of a training script."""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial

from ...errors import LaunchError
from ...launch.detection import detect_launch
from ...launch.launch import Launch
from ..script.ranks import Body, Ranks, environment, exit_when_terminated
from ..script.running import Script
from . import report
from .findings.all import find_all
from .job import Link, RemoteRank, end, pass_on
from .rank import be_rank
from .watch import Outcome, Watch

_BAD_SCRIPT = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add = parser.add_argument
    add("-n", "--ranks", type=int, default=2, metavar="N", help="processes to start (2)")
    add("--steps", type=int, default=5, metavar="N", help="optimizer steps of an epoch (5); longer epochs are cut")
    add(
        "--timeout", type=float, default=180.0, metavar="SECONDS", help="bound on a time in which nothing happens (180)"
    )
    add("--device", choices=("cpu", "cuda"), default="cpu", help="hide the GPUs from the script, or do not (cpu)")
    add("--json", action="store_true", help="print one JSON object instead of text")
    add("-m", "--module", action="store_true", help="the script is the name of a module, as for `python -m`")
    add("script", help="the training script; what follows is its own")
    add("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Check a script and print what was found.

    Returns:
        The exit code: 1 if something is wrong; 2 if the script could not be checked; else 0.
    """
    try:
        launch = detect_launch()
    except LaunchError as error:
        return _refuse(str(error))
    if not args.module and not os.path.isfile(args.script):
        return _refuse(f"{args.script}: there is no such file.")
    if args.ranks < 2 or args.steps < 1 or args.timeout <= 0:
        return _refuse("-n must be at least 2, --steps at least 1, --timeout positive.")
    exit_when_terminated()
    script = Script(args.script, args.arguments, args.module)
    body = partial(be_rank, script, args.steps)
    if launch.kind == "single":
        environments = {rank: environment(rank, args.ranks, args.device) for rank in range(args.ranks)}
        with Ranks(body, environments, serves=True) as ranks:
            return _report(args, Watch(ranks, args.timeout).run())
    return _check_job(args, body, launch)


def _check_job(args: argparse.Namespace, body: Body, launch: Launch) -> int:
    """Check the job to which this process belongs: its child is the rank."""
    if "MASTER_PORT" not in os.environ or "RANK" not in os.environ:
        return _refuse("a job is checked where RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set, as by torchrun.")
    env = {**os.environ, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    env.setdefault("OMP_NUM_THREADS", "1")
    with Ranks(body, {launch.rank: env}, serves=False) as ranks:
        link = Link(launch)  # after the fork, for it may have threads
        if launch.rank:
            return pass_on(ranks, link)
        ranks.remote += [RemoteRank(rank, link) for rank in range(1, launch.world_size)]
        code = _report(args, Watch(ranks, args.timeout).run())
        end(link)
        return code


def _report(args: argparse.Namespace, outcome: Outcome) -> int:
    """Print what was found; return the exit code."""
    findings = find_all(outcome.facts)
    if args.json:
        print(report.as_json(args.script, outcome, findings))
    else:
        print(report.render(args.script, outcome, findings))
    sys.stdout.flush()
    if any(finding.severity == "wrong" for finding in findings):
        return 1
    return _BAD_SCRIPT if outcome.trouble else 0


def _refuse(reason: str) -> int:
    print(f"ddpkit check: {reason}", file=sys.stderr)
    return _BAD_SCRIPT
