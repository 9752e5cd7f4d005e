"""Print how the trials went, for people or as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ..terminal import count, paint
from .comparison import Alignment
from .runs import Run
from .trials import Rehearsal, Trial

SCHEMA = 1  # of the JSON object; raised when a field changes its meaning or goes away
_FEWEST = 2  # starts that begin anew, of which a single one may have had no checkpoint yet
_DESCRIPTIONS = {
    "kill": "rank {rank} was killed",
    "kill-all": "all ranks were killed",
    "terminate": "rank {rank} got SIGTERM",
    "terminate-all": "all ranks got SIGTERM",
    "pause": "rank {rank} was stopped for 2 s",
}


def title(script: str, ranks: Sequence[int], seed: int) -> str:
    """Write the first line."""
    return paint(f"ddpkit rehearse: {script} on {', '.join(map(str, ranks))} ranks, seed {seed}", "bold")


def render_undisturbed(rehearsal: Rehearsal) -> str:
    """Write what the undisturbed runs have shown."""
    lines = [f"undisturbed  {count(rehearsal.length, 'step')}"]
    if rehearsal.reference is None:
        reason = next(iter(rehearsal.excluded.values()))
        lines[0] += f"; the same run twice was not the same ({reason}), so nothing can be compared: is a seed missing?"
        return lines[0]
    distance = rehearsal.reference.distance
    if distance:
        lines[0] += f"; weights of undisturbed runs at most {distance:.2g} of a step apart"
    else:
        lines[0] += "; weights of undisturbed runs equal"
    for ranks, reason in rehearsal.excluded.items():
        lines.append(f"             left out: {count(ranks, 'rank')} do not make the same run ({reason})")
    return "\n".join(lines)


def render_trial(trial: Trial) -> str:
    """Write how a trial went."""
    verdict = paint("wrong", "red") if trial.wrong else paint("ok   ", "green")
    lines = []
    for position, run in enumerate(trial.runs):
        alignment = trial.alignments[position] if trial.alignments else None
        lines.append(f"{count(run.start.ranks, 'rank'):<8} {_describe(run, alignment)}")
    lines += [paint(text, "red") for text in trial.wrong]
    if not trial.wrong:
        lines.append(_describe_files(trial))
    lines += trial.notes
    margin = " " * 18
    return f"trial {trial.number:<4}{verdict}   " + f"\n{margin}".join(lines)


def _describe(run: Run, alignment: Alignment | None) -> str:
    parts = []
    if alignment is None:
        parts.append(count(len(run.steps), "step"))
    elif alignment.stretches:
        parts.append("steps " + ", ".join(f"{stretch.first}-{stretch.last}" for stretch in alignment.stretches))
    else:
        parts.append("no step")
    disturbance = run.start.disturbance
    if disturbance is not None and run.is_disturbed:
        parts.append(_DESCRIPTIONS[disturbance.kind].format(rank=disturbance.rank) + _describe_moment(run))
        if disturbance.kind != "pause":
            parts.append(f"all had ended {run.waited:.1f} s later")
    elif disturbance is not None:
        parts.append("it ended before it was disturbed")
    return "; ".join(parts)


def _describe_moment(run: Run) -> str:
    """Say between which events the disturbance came, where that is not between two steps."""
    disturbance = run.start.disturbance
    if disturbance is None or not run.disturbed:
        return ""
    if disturbance.delay:
        return f" {disturbance.delay:.2f} s after '{run.disturbed}'"
    return f" before '{run.disturbed}'"


def _describe_files(trial: Trial) -> str:
    difference = trial.difference
    files = count(len(difference.compared), "file")
    if not difference.compared:
        return "no file with tensors was compared"
    if difference.bits:
        return f"{files} equal bit for bit"
    return f"{files} equal to {difference.greatest:.1g}"


def render_end(rehearsal: Rehearsal, trials: list[Trial], again: str) -> str:
    """Write the last lines: how many were right, and how to repeat one that was not."""
    wrong = [trial for trial in trials if trial.wrong]
    lines = []
    if wrong:
        lines.append(f"to repeat the first that went wrong: {again}")
    elif never_resumes(trials):
        lines.append(
            "no start went on where the one before had ended: "
            "give the script the flag with which it resumes, by --again if it refuses that flag at first"
        )
    lines.append(_tally(rehearsal, len(trials), len(wrong)))
    return "\n".join(lines)


def _tally(rehearsal: Rehearsal, number: int, wrong: int) -> str:
    if wrong:
        return paint(f"{wrong} of {count(number, 'trial')} went wrong", "red")
    if rehearsal.reference is None:
        return paint(f"{count(number, 'trial')} came to an end, which cannot be compared", "yellow")
    return paint(f"{count(number, 'trial')} ended like the undisturbed run", "green")


def never_resumes(trials: list[Trial]) -> bool:
    """Return whether starts were needed after the first ones, and each began anew."""
    again = [alignment for trial in trials for alignment in trial.alignments[1:] if alignment.stretches]
    return len(again) >= _FEWEST and all(alignment.stretches[0].first == 1 for alignment in again)


def as_json(script: str, seed: int, rehearsal: Rehearsal, trials: list[Trial]) -> str:
    """Write the report as one JSON object."""
    reference = rehearsal.reference
    report: dict[str, Any] = {
        "schema": SCHEMA,
        "script": script,
        "seed": seed,
        "steps": rehearsal.length,
        "distance": None if reference is None else reference.distance,
        "excluded": rehearsal.excluded,
        "trials": [_trial_as_json(trial) for trial in trials],
    }
    return json.dumps(report, indent=2)


def _trial_as_json(trial: Trial) -> dict[str, Any]:
    runs = []
    for position, run in enumerate(trial.runs):
        alignment = trial.alignments[position] if trial.alignments else None
        runs.append(
            {
                "ranks": run.start.ranks,
                "disturbance": asdict(run.start.disturbance) if run.start.disturbance else None,
                "is_disturbed": run.is_disturbed,
                "event": run.disturbed,
                "steps": [[s.first, s.last] for s in alignment.stretches] if alignment else len(run.steps),
                "ends": run.ends,
                "waited": round(run.waited, 3),
            }
        )
    return {
        "number": trial.number,
        "wrong": trial.wrong,
        "notes": trial.notes,
        "starts": runs,
        "files": asdict(trial.difference),
    }
