"""Define the result of one check, and merge the results of many ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...collectives.differences import first_of, name_ranks
from ...join.failures import describe_error

STATUSES = ("ok", "skipped", "warning", "failed")  # from good to bad
_MANY_LINES = 16  # of details; a job has more ranks than a terminal has lines
_MANY_HOSTS = 4


@dataclass
class Check:
    """The result of one check, which is one line of the report.

    Attributes:
        name: The name of the check; stable.
        status: One of `STATUSES`.
        found: The finding, in one sentence.
        remedy: Advice; "" where there is nothing to do.
        details: More lines of the finding.
        measured: Figures by name, the unit at the end of the name.
    """

    name: str
    status: str
    found: str
    remedy: str = ""
    details: list[str] = field(default_factory=list)
    measured: dict[str, float] = field(default_factory=dict)


def attempt(name: str, probe: Callable[..., Check], *args: Any) -> Check:
    """Run a check; if it cannot run, report that as its result."""
    try:
        return probe(*args)
    except Exception as error:
        return Check(name, "skipped", f"cannot be checked here: {describe_error(error)}")


def failure(name: str, error: BaseException, remedy: str) -> Check:
    """Report an error: its first line is the finding, its last ones are the details."""
    first, *rest = str(error).strip().splitlines() or [""]
    is_own = type(error).__module__.startswith("ddpkit")
    found = first if is_own else f"{type(error).__name__}: {first}"
    return Check(name, "failed", found, remedy, rest[-_MANY_LINES:])


def worst(checks: Sequence[Check]) -> str:
    """Return the worst status, "ok" without any check."""
    return max((check.status for check in checks), key=STATUSES.index, default="ok")


def merge(by_rank: dict[int, list[Check]], hosts: Sequence[str]) -> list[Check]:
    """Merge the reports of a job's ranks, so that a common finding is said once.

    Args:
        by_rank: The checks of each rank.
        hosts: The host of each rank.
    """
    by_name: dict[str, dict[int, Check]] = {}
    for rank, checks in by_rank.items():
        for check in checks:
            by_name.setdefault(check.name, {})[rank] = check
    return [_merge_one(found, hosts) for found in by_name.values()]


def _merge_one(by_rank: dict[int, Check], hosts: Sequence[str]) -> Check:
    """Merge one check's results: the first of the worst, with a line for each other finding."""
    ranks_with: dict[tuple[str, str], list[int]] = {}
    for rank, check in by_rank.items():
        ranks_with.setdefault((check.status, check.found), []).append(rank)
    check = max(by_rank.values(), key=_badness)
    if len(ranks_with) == 1:
        return check
    shown = (check.status, check.found)
    others = []
    for finding, ranks in ranks_with.items():
        if finding != shown:
            others.append(f"{say_ranks(ranks, hosts)}: {finding[1]}")
    found = check.found
    if check.status != "ok":
        found = f"{say_ranks(ranks_with[shown], hosts)}: {found}"
    details = [*check.details, *first_of(others, _MANY_LINES)]
    return Check(check.name, check.status, found, check.remedy, details, check.measured)


def _badness(check: Check) -> int:
    return STATUSES.index(check.status)


def say_ranks(ranks: list[int], hosts: Sequence[str]) -> str:
    """Name ranks and their hosts.

    >>> say_ranks([0, 1, 5], ["a", "a", "a", "b", "b", "b"])
    'ranks 0, 1, 5 (a, b)'
    """
    names = list(dict.fromkeys(hosts[rank] for rank in ranks))
    return f"{name_ranks(ranks)} ({', '.join(first_of(names, _MANY_HOSTS))})"


def set_variables(*names: str) -> str:
    """Write those of these environment variables that are set, as "A=1, B=2"."""
    return ", ".join(f"{name}={os.environ[name]}" for name in names if os.environ.get(name))
