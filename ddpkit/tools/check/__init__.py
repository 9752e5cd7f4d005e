"""Run `python -m ddpkit check train.py`: find the silent bugs of a training script."""

from __future__ import annotations

import argparse
import json
import linecache
import os
import sys
from collections import Counter
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ..cli import BAD_SCRIPT, annotate, columns, count, paint, positive, several, show, wrap
from ..cuda import ON_THE_CPU
from ..joining import join_here
from ..ranks import Ranks, Script, add_script, describe, prepare, run_script
from ..recorder import Recorder, before, current
from . import collectives, gradients, random_numbers, samples, training_loop
from .collectives import Collectives
from .facts import KINDS, Facts, Finding, Outcome, Watch
from .loaders import LONGEST, Cut, Ending, Samples
from .modules import Modules
from .observed import Cuda, End, tell
from .random_numbers import Windows
from .source import accepted_in, raised_at
from .steps import Losses, Steps
from .training_loop import TrainingLoop

# Print what was found, for people or as JSON.

SCHEMA = 1  # of the JSON object; raised when a field changes its meaning or goes away
_COLOURS = {"wrong": "red", "suspicious": "yellow"}  # of severities, the worst first
_MARGIN = " " * 12


def render(script: str, outcome: Outcome, findings: list[Finding], accepted: list[Finding]) -> str:
    """Write the report for a terminal, coloured where that is wanted; what is accepted is only counted."""
    parts = [script, count(outcome.steps, "optimizer step")]
    if outcome.facts.is_distributed:
        parts.insert(1, count(outcome.facts.world_size, "rank"))
    elif outcome.steps:
        parts.insert(1, "no process group")
    if outcome.facts.all(Cuda):
        parts.insert(-1, ON_THE_CPU)
    title = f"ddpkit check: {', '.join(parts)}"
    lines = [paint(title, "bold"), ""]
    for finding in findings:
        lines += _lines_of(finding)
    if outcome.trouble:
        details = [f"    {line}" for line in outcome.details]
        lines += [paint(f"ended early: {outcome.trouble}", "yellow"), *details, ""]
    if outcome.unobserved:
        lines += [f"not observed, because of an error in the checker: {', '.join(outcome.unobserved)}", ""]
    if findings or accepted or not outcome.trouble:
        lines.append(_tally(findings, accepted))
    return "\n".join(lines)


def _lines_of(finding: Finding) -> list[str]:
    where = str(finding.where or "")
    head = f"{finding.severity:<12}{finding.kind}"
    gap = " " * max(2, columns() - len(head) - len(where))
    lines = [paint(head, _COLOURS[finding.severity]) + gap + where]
    texts = [finding.evidence, finding.why, f"fix: {finding.fix}"]
    if finding.also:
        texts.append("see also: " + ", ".join(map(str, finding.also)))
    lines += [_MARGIN + line for line in wrap(texts, len(_MARGIN))]
    return [*lines, ""]


def _tally(findings: list[Finding], accepted: list[Finding]) -> str:
    numbers = Counter(finding.severity for finding in findings) + Counter(accepted=len(accepted))
    parts = [f"{numbers[word]} {word}" for word in (*_COLOURS, "accepted") if word in numbers]
    return ", ".join(parts) or paint("nothing found", "green")


def as_json(script: str, outcome: Outcome, findings: list[Finding], accepted: list[Finding]) -> str:
    """Write the report as one JSON object."""
    report: dict[str, Any] = {
        "schema": SCHEMA,
        "script": script,
        "ranks": outcome.facts.world_size,
        "steps": outcome.steps,
        "seconds": round(outcome.seconds, 3),
        "trouble": outcome.trouble,
        "details": outcome.details,
        "unobserved": outcome.unobserved,
        "findings": [_finding_as_json(finding) for finding in findings],
        "accepted": [_finding_as_json(finding) for finding in accepted],
    }
    return json.dumps(report, indent=2)


def _finding_as_json(finding: Finding) -> dict[str, Any]:
    fields = asdict(finding)
    fields["where"] = finding.where and finding.where.as_json()
    fields["also"] = [line.as_json() for line in finding.also]
    return fields


# Find everything that there is to be found in the records of a run.

_ALONE = (*training_loop.ALONE, *gradients.ALONE, *random_numbers.ALONE, *samples.ALONE)
_OF_REPLICAS = (*gradients.RULES, *samples.RULES, *random_numbers.RULES, *collectives.OF_REPLICAS)
_FOLLOW = {  # what another finding explains
    "batches-differ": ("wrong-divisor", "collective-order", "one-rank-decides", "replicas-drift"),
    "not-in-optimizer": ("no-gradients",),
    "same-random-numbers": ("random-numbers-repeat",),
    "gradients-discarded": ("no-gradients",),
    "same-samples": ("same-random-numbers", "samples-repeated"),
    "gradients-not-averaged": ("replicas-differ-at-start", "replicas-drift", "collective-order"),
    "replicas-differ-at-start": ("replicas-drift",),
    "one-rank-decides": ("collective-order",),
    "split-differs": ("validation-seen", "shuffle-differs", "samples-missing", "wrong-divisor", "mean-of-means"),
    "shuffle-differs": ("samples-missing", "samples-repeated", "wrong-divisor"),
}


def find_all(facts: Facts) -> list[Finding]:
    """Return the findings, the worst first, one of a kind for a line, without those that follow from others."""
    rules = [*_ALONE]
    if facts.is_distributed:
        rules += collectives.RULES
        rules += _OF_REPLICAS if facts.are_replicas else gradients.OF_COPIES
    found = [finding for rule in rules for finding in rule(facts)]
    kinds = {finding.kind for finding in found}
    explained = {kind for cause in kinds for kind in _FOLLOW.get(cause, ())}
    by_line: dict[Any, Finding] = {}
    for finding in sorted(found, key=_badness):
        if finding.kind not in explained:
            by_line.setdefault((finding.kind, finding.where), finding)
    return list(by_line.values())


def _badness(finding: Finding) -> int:
    return list(_COLOURS).index(finding.severity)


# Accept findings that are meant.

_HEAD = "# Findings that `python -m ddpkit check --accept` lets pass: the kind, the file, the text of the line."


class Accepted:
    """The lines of a file, of which each accepts one finding, wherever the text of its line has moved in its file.

    Args:
        path: The file. If there is none, nothing is accepted until `update()` makes it.

    Raises:
        argparse.ArgumentTypeError: If it cannot be read or made.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._is_new = not os.path.exists(path)
        if self._is_new and not os.access(self._path.parent, os.W_OK):
            raise argparse.ArgumentTypeError(f"{path} does not exist, and cannot be made in its folder")
        try:
            text = "" if self._is_new else self._path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise argparse.ArgumentTypeError(f"{path} cannot be read: {error}") from None
        lines = map(str.strip, text.split("\n"))
        self._unused = Counter(line for line in lines if line and line[0] != "#")
        for line in self._unused:
            if line.split()[0] not in KINDS:
                raise argparse.ArgumentTypeError(f"{path}: the line {line!r} does not begin with a kind of finding")

    def take(self, finding: Finding) -> bool:
        """Return whether a comment accepts a finding, or else an unused line, which is used then."""
        where = finding.where
        if where and finding.kind in accepted_in(where.file).get(where.line, ()):
            return True
        line = self._line_of(finding)
        is_listed = line in self._unused
        self._unused -= Counter([line])
        return is_listed

    def update(self, findings: list[Finding]) -> None:
        """Say which lines are unused; if there is no file, list the findings in a new one."""
        note = ""
        if self._unused:
            note = f"lists what is no longer found, delete it there: {'; '.join(self._unused)}"
        if self._is_new and findings:
            lines = map(self._line_of, findings)
            self._path.write_text("\n".join([_HEAD, *lines, ""]), encoding="utf-8")
            note = f"is new: the next check accepts {count(len(findings), 'finding')} by it"
        if note:
            show(f"ddpkit check: {self._path} {note}", on_stderr=True)

    def _line_of(self, finding: Finding) -> str:
        where = finding.where
        if where is None:
            return finding.kind
        text = linecache.getline(where.file, where.line).strip()
        return f"{finding.kind} {os.path.relpath(where.file, self._path.parent)}: {text}"


# Check a script.


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add = parser.add_argument
    add("-n", "--ranks", type=several, default=2, metavar="N", help="processes to start (2)")
    add("--steps", type=positive, default=5, metavar="N", help="optimizer steps of an epoch (5); longer epochs are cut")
    add("--accept", type=Accepted, default=os.devnull, metavar="FILE", help="accept what it lists; write it if new")
    more = "exit with 1 also for what is suspicious, or for one kind of it; can be repeated"
    add("--fail-on", action="append", default=["wrong"], choices=[*_COLOURS, *KINDS], metavar="KIND", help=more)
    add("--github", action="store_true", help="print an annotation of each finding's line for GitHub as well")
    add_script(parser, "")


def run(args: argparse.Namespace) -> int:
    """Check a script and print what was found.

    Returns:
        The exit code: 1 if something is wrong, or named by `--fail-on`, and not accepted; 2 if the script could not be
        checked; else 0.
    """
    prepare(args)
    script = Script(args.script, args.arguments, args.module)
    with Ranks(partial(be_rank, script, args.steps), args.ranks, args.device) as ranks:
        return _report(args, Watch(ranks, args.timeout, LONGEST * args.steps).run())


def _report(args: argparse.Namespace, outcome: Outcome) -> int:
    """Print what was found; return the exit code."""
    found = find_all(outcome.facts)
    accepted = [finding for finding in found if args.accept.take(finding)]
    findings = [finding for finding in found if finding not in accepted]
    if args.json:
        print(as_json(args.script, outcome, findings, accepted))
    else:
        show(render(args.script, outcome, findings, accepted))
    if not outcome.trouble:
        args.accept.update(findings)
    if args.github:
        for finding in findings:
            level = "error" if finding.severity == "wrong" else "warning"
            text = f"{finding.evidence}\n{finding.why}\nfix: {finding.fix}"
            annotate(level, text, title=finding.kind, **(finding.where.as_json() if finding.where else {}))
    if any(not {finding.severity, finding.kind}.isdisjoint(args.fail_on) for finding in findings):
        return 1
    return BAD_SCRIPT if outcome.trouble else 0


# Be one rank of the script.


def be_rank(script: Script, steps: int, recorder: Recorder, control: int) -> int:
    """Run the script as the main program of this process, and wait for the end.

    Args:
        script: The script.
        steps: The optimiser steps of an epoch.
        recorder: Tells what is observed.
        control: The descriptor that becomes readable when the process shall end.
    """
    ending = Ending(steps, control)
    observe(ending)
    return run_observed(script, ending)


def run_observed(script: Script, ending: Ending) -> int:
    """Run the script as the main program of this process, and wait for the end."""
    code, failure = run_script(script)
    if failure and isinstance(failure.__cause__, Cut):  # which a generator has turned into an error
        ending.wait("steps")
    tell(End(code, describe(failure), raised_at(failure)))
    sys.stdout.flush()
    sys.stderr.flush()
    ending.wait("end")
    return 0


def observe(ending: Ending) -> tuple[Samples, TrainingLoop]:
    """Install all observers; return those of loaders and optimizers."""
    modules = Modules()
    windows = Windows()
    samples = Samples(ending, windows, modules)
    losses = Losses(modules, samples, ending)
    collectives = Collectives(modules, ending)
    loop = TrainingLoop(modules)
    steps = Steps(ending, modules, losses, windows, collectives, samples, loop)
    for observer in (modules, loop, losses, windows, samples, steps, collectives):
        observer.install()

    def join() -> None:
        if not current().is_main:  # a process that the script has forked to be a rank
            tell(End(reason="forks"))

    before(dist, "init_process_group", join)
    join_here()
    return samples, loop
