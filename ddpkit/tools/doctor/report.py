"""What a check of the doctor found, what many ranks found together, and how a person reads it."""

from __future__ import annotations

import os
import shutil
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TextIO

from ..tables import boxed, can_show, paint

STATUSES = ("ok", "skipped", "warning", "failed")  # from good to bad
_MARKS = {"ok": ("✓", "green"), "skipped": ("–", "dim"), "warning": ("!", "yellow"), "failed": ("✗", "red")}
_PLAIN = {"✓": "+", "–": "-", "✗": "x", "→": "->", "µ": "u", "…": "..."}
_MANY = 16  # lines of details; a job has more ranks than a terminal has lines


@dataclass
class Check:
    """One line of the report.

    Attributes:
        name: What was looked at; stable.
        status: One of `STATUSES`.
        found: What was found, in one sentence.
        remedy: What to do about it; "" where there is nothing to do.
        details: More lines of what was found.
        measured: Figures by name, the unit at the end of the name.
    """

    name: str
    status: str
    found: str
    remedy: str = ""
    details: list[str] = field(default_factory=list)
    measured: dict[str, float] = field(default_factory=dict)

    def dump(self) -> dict[str, Any]:
        return asdict(self)


def attempt(name: str, probe: Callable[..., Check], *args: Any) -> Check:
    """Makes a check; what keeps it from being made is its finding."""
    try:
        return probe(*args)
    except Exception as error:
        return Check(name, "skipped", f"cannot be checked here: {type(error).__name__}: {error}")


def failure(name: str, error: BaseException, remedy: str) -> Check:
    """What a step that raised has found: the first line of the error, the others as details."""
    first, *rest = str(error).strip().splitlines() or [""]
    found = first if type(error).__module__.startswith("ddpkit") else f"{type(error).__name__}: {first}"
    return Check(name, "failed", found, remedy, rest[-_MANY:])


def worst(checks: Sequence[Check]) -> str:
    """The status of all together."""
    return max((check.status for check in checks), key=STATUSES.index, default="ok")


def merge(by_rank: dict[int, list[Check]], hosts: Sequence[str]) -> list[Check]:
    """The report of a job, from the reports of its ranks: what they agree on is said once."""
    names = dict.fromkeys(check.name for checks in by_rank.values() for check in checks)
    return [_together({r: c for r, cs in by_rank.items() for c in cs if c.name == name}, hosts) for name in names]


def _together(found: dict[int, Check], hosts: Sequence[str]) -> Check:
    groups: dict[tuple[str, str], list[int]] = {}
    for rank, check in found.items():
        groups.setdefault((check.status, check.found), []).append(rank)
    bad = max(found, key=lambda rank: STATUSES.index(found[rank].status))  # the first of the worst
    check = found[bad]
    if len(groups) == 1:
        return check
    lines = [f"{say_ranks(ranks, hosts)}: {text}" for (_, text), ranks in groups.items() if bad not in ranks]
    where = f"{say_ranks(groups[check.status, check.found], hosts)}: "
    found_there = check.found if check.status == "ok" else where + check.found
    details = [*check.details, *lines[:_MANY], *([f"… and {len(lines) - _MANY} more"] if len(lines) > _MANY else [])]
    return Check(check.name, check.status, found_there, check.remedy, details, check.measured)


def say_ranks(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """Names ranks and their hosts.

    >>> say_ranks([0, 1, 2, 5], ["a", "a", "a", "b", "b", "b"])
    'ranks 0-2, 5 (a, b)'
    """
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and spans[-1][-1] == rank - 1:
            spans[-1][1:] = [rank]
        else:
            spans.append([rank])
    names = list(dict.fromkeys(hosts[rank] for rank in ranks))
    places = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return f"rank{'s' * (len(ranks) > 1)} {', '.join('-'.join(map(str, span)) for span in spans)} ({places})"


def render(title: str, checks: Sequence[Check], stream: TextIO) -> str:
    """The report as text for this stream: aligned, coloured on a terminal, in ASCII where it takes nothing else."""
    lines = _in_a_box(checks, stream) or _aligned(checks, stream)
    last = paint(tally(checks), _MARKS[worst(checks)][1], stream)
    text = "\n".join([paint(title, "bold", stream), "", *lines, "", last])
    if not can_show("".join(_PLAIN), stream):
        for sign, plain in _PLAIN.items():
            text = text.replace(sign, plain)
        text = text.encode("ascii", "backslashreplace").decode()
    return text


def _in_a_box(checks: Sequence[Check], stream: TextIO) -> list[str]:
    rows = []
    for check in checks:
        mark, colour = _MARKS[check.status]
        text = [("\n".join([check.found, *check.details]), "")]
        fixes = [(f"\n→ {check.remedy}", colour)] if check.remedy else []
        rows.append([[(f"{mark} {check.name}", colour)], [*text, *fixes]])
    return boxed([], rows, stream)


def _aligned(checks: Sequence[Check], stream: TextIO) -> list[str]:
    width = min(shutil.get_terminal_size((100, 24)).columns, 120) if stream.isatty() else 100
    column = max(len(check.name) for check in checks) + 4
    lines = []
    for check in checks:
        mark, colour = _MARKS[check.status]
        block = [line for text in (check.found, *check.details) for line in _wrap(text, width - column)]
        fixes = _wrap(f"→ {check.remedy}", width - column, "  ") if check.remedy else []
        head = f"{mark} {check.name.ljust(column - 3)} "
        lines.append((paint(head, colour, stream) + block[0]).rstrip())
        lines += [" " * column + line for line in block[1:]]
        lines += [" " * column + paint(line, colour, stream) for line in fixes]
    return lines


def tally(checks: Sequence[Check]) -> str:
    """How many there are of each status, the bad ones by name.

    >>> tally([Check("shm", "ok", ""), Check("cores", "ok", ""), Check("ports", "failed", "")])
    '2 ok, 1 failed (ports)'
    """
    parts = []
    for status in STATUSES:
        names = [check.name for check in checks if check.status == status]
        noun = "warning" + "s" * (len(names) != 1) if status == "warning" else status
        which = f" ({', '.join(names)})" if status in ("warning", "failed") else ""
        parts += [f"{len(names)} {noun}{which}"] if names else []
    return ", ".join(parts)


def _wrap(text: str, width: int, indent: str = "") -> list[str]:
    options = {"break_long_words": False, "break_on_hyphens": False}
    out = textwrap.wrap(text, max(width, 40), subsequent_indent=indent, **options)  # type: ignore[arg-type]
    return out or [""]


def number_of(noun: str, number: int) -> str:
    """The number with its noun, in the plural where it is one.

    >>> number_of("rank", 1), number_of("rank", 2)
    ('1 rank', '2 ranks')
    """
    return f"{number} {noun}{'s' * (number != 1)}"


def variables(*names: str) -> str:
    """Those of these environment variables that are set, as text."""
    return ", ".join(f"{name}={os.environ[name]}" for name in names if os.environ.get(name))
