"""Run `python -m ddpkit rehearse train.py`: does a training script go on after what happens to jobs?"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..cli import BAD_SCRIPT, checked_by, count, paint, positive, positive_seconds, show
from ..cuda import ON_THE_CPU
from ..ranks import FOLDER, add_script, prepare
from .rank import KINDS
from .trials import Difference, Rehearsal, Run, Trial

# Print how the trials went, for people or as JSON.

SCHEMA = 2  # of the JSON object; raised when a field changes its meaning or goes away
_FEWEST = 2  # starts that begin anew, of which a single one may have had no checkpoint yet


def render_undisturbed(rehearsal: Rehearsal) -> str:
    """Write what the undisturbed runs have shown."""
    line = f"undisturbed  {count(rehearsal.length, 'step')}"
    if rehearsal.reference is None:
        reason = next(iter(rehearsal.excluded.values()))
        return f"{line}; two undisturbed runs differ ({reason}), so nothing can be compared. Is a seed missing?"
    distance = "equal"
    if rehearsal.reference.distance:
        distance = f"at most {rehearsal.reference.distance:.2g} of a step apart"
    lines = [f"{line}; weights of undisturbed runs {distance}"]
    for ranks, reason in rehearsal.excluded.items():
        lines.append(f"             not compared: runs on {count(ranks, 'rank')} differ ({reason})")
    return "\n".join(lines)


def render_trial(trial: Trial) -> str:
    """Write how a trial went."""
    verdict = paint("wrong", "red") if trial.wrong else paint("ok   ", "green")
    lines = [f"{count(run.ranks, 'rank'):<8} {_describe(run)}" for run in trial.runs]
    lines += [paint(text, "red") for text in trial.wrong]
    if not trial.wrong:
        lines.append(_describe_files(trial.difference))
    margin = " " * 18
    return f"trial {trial.number:<4}{verdict}   " + f"\n{margin}".join([*lines, *trial.notes])


def _describe(run: Run) -> str:
    """Say which steps a start has made, and what happened to it: the event, where that is not a step."""
    text = count(len(run.steps), "step")
    if run.stretches is not None:
        text = f"steps {', '.join(f'{first}-{last}' for first, last in run.stretches)}" if run.stretches else "no step"
    disturbance = run.disturbance
    if disturbance is None:
        return text
    if not run.is_disturbed:
        return f"{text}; it ended before it was disturbed"
    text += f"; {KINDS[disturbance.kind].format(rank=disturbance.rank)}"
    if run.event:
        moment = f" {disturbance.delay:.2f} s after" if disturbance.delay else " at"
        text += f"{moment} '{run.event}'"
    return f"{text}; all had ended {run.waited:.1f} s later"


def _describe_files(difference: Difference) -> str:
    if not difference.compared:
        return "no file with tensors was compared"
    equal = "bit for bit" if difference.bits else f"to {difference.greatest:.1g}"
    return f"{count(len(difference.compared), 'file')} equal {equal}"


def render_end(rehearsal: Rehearsal, trials: list[Trial]) -> str:
    """Write the last lines: how many were right, and how to repeat one that was not."""
    wrong = [trial.number for trial in trials if trial.wrong]
    number = count(len(trials), "trial")
    tally = paint(f"{number} ended like the undisturbed run", "green")
    if wrong:
        tally = paint(f"{len(wrong)} of {number} went wrong", "red")
        return f"to repeat the first that went wrong: the same command with --only {wrong[0]}\n{tally}"
    if rehearsal.reference is None:
        tally = paint(f"{number} ended, but there is no undisturbed run to compare with", "yellow")
    if not never_resumes(trials):
        return tally
    advice = "add the flag with which the script resumes; if its first start refuses that flag, use --again"
    return f"no start continued from the last one: {advice}\n{tally}"


def never_resumes(trials: list[Trial]) -> bool:
    """Return whether starts were needed after the first ones, and each began anew."""
    first = [run.stretches[0][0] for trial in trials for run in trial.runs[1:] if run.stretches]
    return len(first) >= _FEWEST and set(first) == {1}


def as_json(args: argparse.Namespace, rehearsal: Rehearsal, trials: list[Trial]) -> str:
    """Write the report as one JSON object."""
    reference = rehearsal.reference
    report = {
        "schema": SCHEMA,
        "script": args.script,
        "seed": args.seed,
        "steps": rehearsal.length,
        "distance": None if reference is None else reference.distance,
        "excluded": rehearsal.excluded,
        "trials": [_trial_as_json(trial) for trial in trials],
    }
    return json.dumps(report, indent=2)


def _trial_as_json(trial: Trial) -> dict[str, Any]:
    return {
        "number": trial.number,
        "wrong": trial.wrong,
        "notes": trial.notes,
        "starts": [_run_as_json(run) for run in trial.runs],
        "files": asdict(trial.difference),
    }


def _run_as_json(run: Run) -> dict[str, Any]:
    return {
        "ranks": run.ranks,
        "disturbance": run.disturbance and asdict(run.disturbance),
        "is_disturbed": run.is_disturbed,
        "event": run.event,
        "steps": len(run.steps) if run.stretches is None else run.stretches,
        "ends": run.ends,
        "waited": round(run.waited, 3),
    }


_TRIALS = 4  # each kind once


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add = parser.add_argument
    between = "numbers of processes between which it changes (2,3)"
    add("-n", "--ranks", type=_numbers, default="2,3", metavar="N,N", help=between)
    add("--trials", type=positive, default=_TRIALS, metavar="N", help=f"runs that are disturbed ({_TRIALS})")
    add("--seed", type=int, default=0, metavar="N", help="of the disturbances (0)")
    add("--only", type=positive, metavar="N", help="repeat this trial alone")
    kinds = ",".join(KINDS)
    add("--kinds", type=_kinds, default=kinds, metavar="KIND,KIND", help=f"of disturbances ({kinds})")
    more = "more arguments of the script when started again"
    add("--again", type=checked_by(shlex.split), default="", metavar="ARGS", help=more)
    add("--exact", action="store_true", help="the tensors in its files must be equal bit for bit")
    bound = "in which all ranks must end once one has (30)"
    add("--grace", type=positive_seconds, default=30.0, metavar="SECONDS", help=bound)
    kept = "keep the files of undisturbed runs and of those that went wrong"
    add("--keep", type=_new_folder, metavar="FOLDER", help=kept)
    add_script(parser, f", and {FOLDER} in it is each run's own folder")


def _numbers(text: str) -> list[int]:
    if not all(re.fullmatch("[1-9][0-9]*", number) for number in text.split(",")):
        raise argparse.ArgumentTypeError(f"-n takes numbers of ranks such as 2,3, not {text}.")
    return list(dict.fromkeys(map(int, text.split(","))))


def _kinds(text: str) -> list[str]:
    kinds = text.split(",")
    unknown = set(kinds) - set(KINDS)
    if unknown:
        raise argparse.ArgumentTypeError(f"--kinds knows {', '.join(KINDS)}, not {', '.join(sorted(unknown))}.")
    return kinds


def _new_folder(text: str) -> Path:
    folder = Path(text)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise argparse.ArgumentTypeError(f"--keep takes an empty or new folder; {text} holds something.")
    return folder


def run(args: argparse.Namespace) -> int:
    """Rehearse a script and print how it went.

    Returns:
        The exit code: 1 if a trial went wrong; 2 if the script could not be rehearsed, or compared; else 0.
    """
    prepare(args)
    folder = args.keep or Path(tempfile.mkdtemp(prefix="ddpkit-rehearse-"))
    try:
        return _rehearse(args, folder.resolve())
    finally:
        if args.keep is None:
            shutil.rmtree(folder, ignore_errors=True)


def _rehearse(args: argparse.Namespace, folder: Path) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    rehearsal = Rehearsal(args, folder)
    rehearsal.run_undisturbed()
    if not args.json:
        title = f"ddpkit rehearse: {args.script} on {', '.join(map(str, args.ranks))} ranks"
        parts = [title, *([ON_THE_CPU] if rehearsal.uses_cuda else []), f"seed {args.seed}"]
        show(paint(", ".join(parts), "bold"))
        show(render_undisturbed(rehearsal))
    trials: list[Trial] = []
    for number in [args.only] if args.only else range(1, args.trials + 1):
        trials.append(rehearsal.run_trial(number))
        if not args.json:
            show(render_trial(trials[-1]))
    if args.json:
        print(as_json(args, rehearsal, trials))
    else:
        show(render_end(rehearsal, trials))
    has_failed = any(trial.wrong for trial in trials) or never_resumes(trials)
    if not has_failed and rehearsal.reference is None:
        return BAD_SCRIPT
    return int(has_failed)
