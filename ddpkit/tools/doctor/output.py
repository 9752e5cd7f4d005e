"""Print the doctor's report, for people or as JSON."""

from __future__ import annotations

import json
import shutil
import socket
import sys
import textwrap
from collections.abc import Sequence
from typing import Any, TextIO

from ..terminal import can_show, count, paint
from . import machine_checks
from .check import STATUSES, Check, merge, worst
from .job_checks import pairs
from .report import Report

SCHEMA = 1  # of the JSON object; raised when a field changes its meaning or goes away
_MARKS = {"ok": "✓", "skipped": "–", "warning": "!", "failed": "✗"}
_COLOURS = {"ok": "green", "skipped": "dim", "warning": "yellow", "failed": "red"}
_PLAIN = {"✓": "+", "–": "-", "✗": "x", "→": "->", "µ": "u", "…": "..."}
_WIDTH = 100  # columns where the output is no terminal
_WIDEST = 120


def print_report(report: Report, as_json: bool) -> int:
    """Print the report; rank 0 does for all if it has heard of them. Return the exit code."""
    checks = merge(report.peers, report.hosts) if report.peers else report.checks
    code = int(worst(checks) == "failed")
    if report.rank == 0:
        if as_json:
            text = json.dumps(_as_json(report, checks), indent=2)
        else:
            text = render(f"ddpkit doctor: {_subject(report)}", checks, sys.stdout)
        print(text)
    elif 0 not in report.peers:  # rank 0 cannot speak for this one
        _print_failures(report.rank, checks)
    sys.stdout.flush()
    return code


def _subject(report: Report) -> str:
    if report.launch:
        return f"the job of {count(report.launch.world_size, 'rank')}"
    return f"this machine, {socket.gethostname()}"


def _print_failures(rank: int, checks: Sequence[Check]) -> None:
    where = f"rank {rank} ({socket.gethostname()})"
    for check in checks:
        if check.status == "failed":
            what = f"{check.name}: {check.found} {check.remedy}"
            print(f"ddpkit doctor: {where}: {what}", file=sys.stderr)


def _as_json(report: Report, checks: Sequence[Check]) -> dict[str, Any]:
    scope = "machine"
    world_size = 1
    if report.launch:
        scope = "job"
        world_size = report.launch.world_size
    return {
        "schema": SCHEMA,
        "scope": scope,
        "status": worst(checks),
        "host": socket.gethostname(),
        "world_size": world_size,
        "versions": machine_checks.installed(),
        "checks": [check.dump() for check in checks],
        "ranks": report.places,
        "pairs": pairs(report.places),
    }


def render(title: str, checks: Sequence[Check], stream: TextIO) -> str:
    """Write a report for a stream.

    It is aligned, coloured on a terminal, and in ASCII where the stream takes nothing else.
    """
    lines = [paint(title, "bold", stream), ""]
    name_width = max(len(check.name) for check in checks)
    for check in checks:
        lines += _lines_of(check, name_width, stream)
    lines += ["", paint(tally(checks), _COLOURS[worst(checks)], stream)]
    text = "\n".join(lines)
    if can_show("".join(_PLAIN), stream):
        return text
    for sign, plain in _PLAIN.items():
        text = text.replace(sign, plain)
    return text.encode("ascii", "backslashreplace").decode()


def _lines_of(check: Check, name_width: int, stream: TextIO) -> list[str]:
    """Write one check: its mark, its name, and in a column beside them the finding and remedy."""
    colour = _COLOURS[check.status]
    head = f"{_MARKS[check.status]} {check.name.ljust(name_width)}  "
    margin = " " * len(head)
    width = _width(stream) - len(head)
    first, *more = [line for text in (check.found, *check.details) for line in _wrap(text, width)]
    lines = [(paint(head, colour, stream) + first).rstrip()]
    lines += [margin + line for line in more]
    if check.remedy:
        remedy = _wrap(f"→ {check.remedy}", width, indent="  ")
        lines += [margin + paint(line, colour, stream) for line in remedy]
    return lines


def _width(stream: TextIO) -> int:
    if not stream.isatty():
        return _WIDTH
    return min(shutil.get_terminal_size((_WIDTH, 24)).columns, _WIDEST)


def _wrap(text: str, width: int, indent: str = "") -> list[str]:
    lines = textwrap.wrap(
        text,
        max(width, 40),
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return lines or [""]


def tally(checks: Sequence[Check]) -> str:
    """Count the checks of each status, and name the bad ones.

    >>> tally([Check("shm", "ok", ""), Check("cores", "ok", ""), Check("ports", "failed", "")])
    '2 ok, 1 failed (ports)'
    """
    parts = []
    for status in STATUSES:
        names = [check.name for check in checks if check.status == status]
        if not names:
            continue
        number = f"{len(names)} {status}"
        if status == "warning":
            number = count(len(names), status)
        if status in ("warning", "failed"):
            number += f" ({', '.join(names)})"
        parts.append(number)
    return ", ".join(parts)
