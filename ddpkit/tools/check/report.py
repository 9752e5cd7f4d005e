"""Print what was found, for people or as JSON."""

from __future__ import annotations

import json
import shutil
import textwrap
from dataclasses import asdict
from typing import Any

from ..terminal import count, paint
from .findings.facts import SEVERITIES, Finding
from .watch import Outcome

SCHEMA = 1  # of the JSON object; raised when a field changes its meaning or goes away
_COLOURS = {"wrong": "red", "suspicious": "yellow", "slow": "dim"}
_MARGIN = " " * 12
_WIDEST = 120


def render(script: str, outcome: Outcome, findings: list[Finding]) -> str:
    """Write the report for a terminal, coloured where that is wanted."""
    world = count(outcome.facts.world_size, "rank")
    title = f"ddpkit check: {script}, {world}, {count(outcome.steps, 'optimizer step')}"
    lines = [paint(title, "bold"), ""]
    for finding in findings:
        lines += _lines_of(finding)
    if outcome.trouble:
        lines += [paint(f"ended early: {outcome.trouble}", "yellow")]
        lines += [f"    {line}" for line in outcome.details]
        lines += [""]
    if outcome.unobserved:
        lines += [f"not observed, for an error of the checker: {', '.join(outcome.unobserved)}", ""]
    lines.append(_tally(findings))
    return "\n".join(lines)


def _lines_of(finding: Finding) -> list[str]:
    columns = min(shutil.get_terminal_size((100, 24)).columns, _WIDEST)
    where = str(finding.where or "")
    head = f"{finding.severity:<12}{finding.kind}"
    gap = " " * max(2, columns - len(head) - len(where))
    lines = [paint(head, _COLOURS[finding.severity]) + gap + where]
    texts = [finding.evidence, finding.why, f"fix: {finding.fix}"]
    if finding.also:
        texts.append("see also: " + ", ".join(map(str, finding.also)))
    for text in texts:
        lines += textwrap.wrap(
            text,
            columns,
            initial_indent=_MARGIN,
            subsequent_indent=_MARGIN,
            break_long_words=False,
            break_on_hyphens=False,
        )
    return [*lines, ""]


def _tally(findings: list[Finding]) -> str:
    if not findings:
        return paint("nothing found", "green")
    parts = []
    for severity in SEVERITIES:
        number = sum(finding.severity == severity for finding in findings)
        if number:
            parts.append(f"{number} {severity}")
    return ", ".join(parts)


def as_json(script: str, outcome: Outcome, findings: list[Finding]) -> str:
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
    }
    return json.dumps(report, indent=2)


def _finding_as_json(finding: Finding) -> dict[str, Any]:
    fields = asdict(finding)
    where = finding.where
    fields["where"] = {"file": where.shown, "line": where.line} if where else None
    fields["also"] = [{"file": line.shown, "line": line.line} for line in finding.also]
    return fields
