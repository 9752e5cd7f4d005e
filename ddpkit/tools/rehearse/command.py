"""Run `python -m ddpkit rehearse train.py`: does a training script go on after what happens to jobs?"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import sys
import tempfile
from pathlib import Path

from ..script.ranks import exit_when_terminated
from ..script.running import Script
from ..terminal import announce
from . import report
from .plan import KINDS
from .runs import Limits
from .trials import FOLDER, Options, Rehearsal, Trial, UnfitScriptError

_BAD_SCRIPT = 2
_TRIALS = 6
_DEFAULTS = {"kinds": ",".join(KINDS), "again": "", "device": "cpu", "grace": 30.0, "timeout": 180.0}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add = parser.add_argument
    add("-n", "--ranks", default="2,3", metavar="N,N", help="numbers of processes between which it changes (2,3)")
    add("--trials", type=int, default=_TRIALS, metavar="N", help=f"runs that are disturbed ({_TRIALS})")
    add("--seed", type=int, default=0, metavar="N", help="of the disturbances (0)")
    add("--only", type=int, metavar="N", help="repeat this trial alone")
    add("--kinds", metavar="KIND,KIND", help=f"of disturbances ({_DEFAULTS['kinds']})")
    add("--again", metavar="ARGS", help="more arguments of the script when started again")
    add("--exact", action="store_true", help="the tensors in its files must be equal bit for bit")
    add("--grace", type=float, metavar="SECONDS", help="in which all ranks must end once one has (30)")
    add("--timeout", type=float, metavar="SECONDS", help="bound on a time without steps (180)")
    add("--device", choices=("cpu", "cuda"), help="hide the GPUs, or do not (cpu)")
    add("--keep", type=Path, metavar="FOLDER", help="keep the files of undisturbed runs and of those that went wrong")
    add("--json", action="store_true", help="print one JSON object instead of text")
    add("-m", "--module", action="store_true", help="the script is the name of a module, as for `python -m`")
    add("script", help=f"the training script; what follows is its own, and {FOLDER} in it is each run's own folder")
    add("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.set_defaults(**_DEFAULTS)


def run(args: argparse.Namespace) -> int:
    """Rehearse a script and print how it went.

    Returns:
        The exit code: 1 if a trial went wrong; 2 if the script could not be rehearsed, or compared; else 0.
    """
    refusal = _refuse(args)
    if refusal:
        print(f"ddpkit rehearse: {refusal}", file=sys.stderr)
        return _BAD_SCRIPT
    exit_when_terminated()
    folder = args.keep or Path(tempfile.mkdtemp(prefix="ddpkit-rehearse-"))
    try:
        return _rehearse(args, folder.resolve())
    except UnfitScriptError as error:
        print(f"ddpkit rehearse: {error}", *error.output, sep="\n    ", file=sys.stderr)
        return _BAD_SCRIPT
    finally:
        if args.keep is None:
            shutil.rmtree(folder, ignore_errors=True)


def _refuse(args: argparse.Namespace) -> str:
    """Say what is wrong with the arguments, "" if nothing is."""
    if not args.module and not os.path.isfile(args.script):
        return f"{args.script}: there is no such file."
    if not all(re.fullmatch("[1-9][0-9]*", number) for number in args.ranks.split(",")):
        return f"-n takes numbers of ranks such as 2,3, not {args.ranks}."
    try:
        shlex.split(args.again)
    except ValueError as error:
        return f"--again: {error}."
    unknown = set(args.kinds.split(",")) - set(KINDS)
    if unknown:
        return f"--kinds knows {', '.join(KINDS)}, not {', '.join(sorted(unknown))}."
    if min(args.trials, args.only or 1) < 1 or min(args.grace, args.timeout) <= 0:
        return "--trials and --only count from 1; --grace and --timeout must be positive."
    if args.keep and args.keep.exists() and (not args.keep.is_dir() or any(args.keep.iterdir())):
        return f"--keep takes an empty or new folder; {args.keep} holds something."
    return ""


def _rehearse(args: argparse.Namespace, folder: Path) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    path = args.script if args.module else os.path.abspath(args.script)
    options = Options(
        script=Script(path, args.arguments, args.module),
        again=shlex.split(args.again),
        ranks=list(dict.fromkeys(map(int, args.ranks.split(",")))),
        kinds=args.kinds.split(","),
        seed=args.seed,
        exact=args.exact,
        limits=Limits(args.timeout, args.grace),
        device=args.device,
    )
    rehearsal = Rehearsal(options, folder, announce)
    rehearsal.run_undisturbed()
    if not args.json:
        print(report.title(args.script, options.ranks, args.seed))
        print(report.render_undisturbed(rehearsal), flush=True)
    trials: list[Trial] = []
    for number in [args.only] if args.only else range(1, args.trials + 1):
        trials.append(rehearsal.run_trial(number))
        if not args.json:
            print(report.render_trial(trials[-1]), flush=True)
    if args.json:
        print(report.as_json(args.script, args.seed, rehearsal, trials))
    else:
        wrong = next((trial.number for trial in trials if trial.wrong), 0)
        print(report.render_end(rehearsal, trials, _repeat(args, wrong)), flush=True)
    has_failed = any(trial.wrong for trial in trials) or report.never_resumes(trials)
    if not has_failed and rehearsal.reference is None:
        return _BAD_SCRIPT
    return int(has_failed)


def _repeat(args: argparse.Namespace, number: int) -> str:
    """Write the command that repeats a trial."""
    words = ["python", "-m", "ddpkit", "rehearse", "-n", args.ranks, "--seed", str(args.seed), "--only", str(number)]
    for flag in _DEFAULTS:
        value = getattr(args, flag)
        if value != _DEFAULTS[flag]:
            words.append(f"--{flag}={value}")
    for flag in ("exact", "module"):
        if getattr(args, flag):
            words.append(f"--{flag}")
    return shlex.join([*words, args.script, *args.arguments])
