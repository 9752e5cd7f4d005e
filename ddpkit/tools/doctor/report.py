"""Collect the results of checks: those of this process and, in a job, those of the other ranks."""

from __future__ import annotations

import json
import math
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ...collectives.differences import first_of, name_ranks
from ...errors import LaunchError, describe_error
from ...join.store import Pause
from ...launch.launch import Launch
from ...parsing import parse, refuse_text
from ..terminal import announce

# Define the result of one check, and merge the results of many ranks.

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


MARK = "ddpkit/doctor"  # in the store of a doctor's job
_CHECK = {  # as the ranks tell each other
    **dict.fromkeys(("name", "status", "found", "remedy"), str),
    "details": [str],
    "measured": dict[str, int | float],
}
_OF_A_JOB = ("master", "join", "ranks", "same versions", "mean", "latency")
_REMEDIES = {
    "master": (
        "Set MASTER_ADDR to a name or address of rank 0's host that every node reaches, "
        "MASTER_PORT to a port that is free there and open in the firewall, and start rank 0."
    ),
    "join": (
        "Start every rank with the same WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and look at the "
        "output of those that are missing. If a connection failed, see interface above."
    ),
}
_OTHER_REMEDY = (
    "If it is about a connection, see interface above. If --backend gloo or --device cpu helps, "
    "it is the accelerators' backend: NCCL_DEBUG=INFO says more."
)


class Report:
    """A report in the making.

    Args:
        launch: Of the job to examine; None for this machine.
        timeout: Bound on the meeting of the ranks, in seconds.
        first: The result of the first check.

    Attributes:
        rank: This process's rank, 0 without a job.
        checks: The results of this process.
        doing: The name of the check that runs now.
        records: A description of each rank, once they have joined.
        hosts: The host of each rank, "?" while it is not known.
        peers: The results of each rank, as far as they are known.
    """

    def __init__(self, launch: Launch | None, timeout: float, first: Check) -> None:
        self.launch = launch
        self.timeout = timeout
        self.rank = launch.rank if launch else 0
        self.checks = [first]
        self.doing = "launch"
        self.records: list[dict[str, Any]] = []
        self.hosts: list[str] = []
        self.peers: dict[int, list[Check]] = {}
        self._deadline = time.monotonic() + timeout

    def time_left(self) -> timedelta:
        """Return the rest of the time-out, in whole seconds, at least one."""
        return timedelta(seconds=max(1, math.ceil(self._deadline - time.monotonic())))

    def begin(self, name: str, text: str) -> None:
        """Note the check that begins, and show it to the person.

        Args:
            name: The name of the check that would fail.
            text: Words for the person.
        """
        self.doing = name
        if self.rank == 0:
            announce(text)

    def add(self, check: Check) -> None:
        """Add a result."""
        self.checks.append(check)

    def fail(self, error: Exception) -> None:
        """Add the failure of the check that runs now."""
        self.add(failure(self.doing, error, _REMEDIES.get(self.doing, _OTHER_REMEDY)))

    def skip_rest(self, reason: str) -> None:
        """Mark as skipped all checks of a job that have not run."""
        done = {check.name for check in self.checks}
        for name in _OF_A_JOB:
            if name not in done:
                self.add(Check(name, "skipped", reason))

    def dump(self) -> str:
        """Write this rank's results, for the others."""
        checks = [asdict(check) for check in self.checks]
        return json.dumps({"host": socket.gethostname(), "checks": checks})

    def post(self, store: dist.Store) -> None:
        """Leave this rank's results in the store: rank 0 reports them even if ranks cannot join."""
        store.set(_key(self.rank), self.dump())

    def await_posts(self, store: dist.Store, world_size: int) -> None:
        """Wait for the posts of all ranks.

        Raises:
            LaunchError: If ranks do not come in time; it names them. If the store has gone.
        """
        self.hosts = ["?"] * world_size
        try:
            self._wait_for_posts(store, world_size)
            missing = [rank for rank in range(world_size) if not self._read_post(store, rank)]
        except LaunchError:
            raise
        except RuntimeError as error:
            reason = "rank 0, which has given up or died: see its report"
            raise LaunchError(f"The store has gone with {reason}.") from error
        if missing:
            raise LaunchError(
                f"{name_ranks(missing).capitalize()} of {world_size} did not come within {self.timeout:g} s. "
                "Are they running, with this MASTER_ADDR and MASTER_PORT?"
            )

    def take_peers(self, texts: Sequence[str]) -> None:
        """Take in the results of all ranks, which have written them with `dump`."""
        for rank, text in enumerate(texts):
            _, self.peers[rank] = read_results(text, f"report of rank {rank}")

    def _wait_for_posts(self, store: dist.Store, world_size: int) -> None:
        keys = [_key(rank) for rank in range(world_size)]
        pause = Pause()
        while time.monotonic() < self._deadline and not store.check(keys):
            pause()

    def _read_post(self, store: dist.Store, rank: int) -> bool:
        """Take in the post of a rank; return false if there is none."""
        key = _key(rank)
        if not store.check([key]):
            return False
        host, checks = read_results(store.get(key), key)
        self.hosts[rank] = host
        self.peers[rank] = self.checks if rank == self.rank else checks
        return True


def _key(rank: int) -> str:
    return f"{MARK}/{rank}"


def read_results(text: bytes | str, key: str) -> tuple[str, list[Check]]:
    """Read another rank's host and results.

    Args:
        text: The text.
        key: Where it comes from.

    Raises:
        LaunchError: If no rank wrote it.
    """
    report = parse(text, key, {"host": str, "checks": [_CHECK]})
    if any(entry["status"] not in STATUSES for entry in report["checks"]):
        refuse_text(text, key)
    return report["host"], [Check(**entry) for entry in report["checks"]]
