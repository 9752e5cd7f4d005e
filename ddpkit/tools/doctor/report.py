"""Collect the results of checks, those of this process and of the job's other ranks, and print them."""

from __future__ import annotations

import json
import math
import os
import platform
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from typing import Any

import numpy
import torch
import torch.distributed as dist

from ... import Launch, LaunchError
from ...collectives.differences import first_of, name_ranks
from ...errors import describe_error
from ...join.store import Pause
from ...parsing import parse, refuse_text
from ..cli import announce, count, paint, show, wrap

SCHEMA = 2  # of the JSON object; raised when a field changes its meaning or goes away
STATUSES = ("ok", "skipped", "warning", "failed")  # from good to bad
_COLOURS = {"ok": "green", "skipped": "dim", "warning": "yellow", "failed": "red"}
_MANY_LINES = 16  # of details; a job has more ranks than a terminal has lines
_MANY_HOSTS = 4
MARK = "ddpkit/doctor"  # in the store of a doctor's job
_RECORD = {  # a rank, as the others hear of it
    **dict.fromkeys(("rank", "pid", "node_rank", "local_rank"), int),
    **dict.fromkeys(("host", "device"), str),
    "versions": dict[str, str],
}
_CHECK = {**dict.fromkeys(("name", "status", "found", "remedy"), str), "details": [str]}
_OF_A_JOB = ("master", "join", "ranks", "same versions", "mean")
_REMEDIES = {
    "master": (
        "Set MASTER_ADDR to a name or address of rank 0's host that every node reaches, "
        "MASTER_PORT to a port that is free there and open in the firewall, and start rank 0."
    ),
    "join": (
        "Start every rank with the same WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and look at the "
        "output of the missing ones. If a connection failed, see interface above."
    ),
}
_OTHER_REMEDY = (
    "If it is about a connection, see interface above. If --backend gloo or --device cpu helps, "
    "the accelerators' backend fails: set NCCL_DEBUG=INFO for details."
)


@dataclass
class Check:
    """The result of one check, which is one line of the report.

    Attributes:
        name: The name of the check; stable.
        status: One of `STATUSES`.
        found: The finding, in one sentence.
        remedy: Advice; "" where there is nothing to do.
        details: More lines of the finding.
    """

    name: str
    status: str
    found: str
    remedy: str = ""
    details: list[str] = field(default_factory=list)


def worst(checks: Sequence[Check]) -> str:
    """Return the worst status, "ok" without any check."""
    return max((check.status for check in checks), key=STATUSES.index, default="ok")


def installed() -> dict[str, str]:
    """List by name the versions that must be the same on every rank."""
    found = {
        "ddpkit": str(sys.modules["ddpkit"].__version__),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
    }
    if torch.version.cuda:
        found["CUDA"] = torch.version.cuda
    if dist.is_available() and dist.is_nccl_available():
        numbers = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        found["NCCL"] = ".".join(map(str, numbers))
    return found


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
        record: A description of this rank.
        peers: The record and the results of each rank, as far as they are known.
    """

    def __init__(self, launch: Launch | None, timeout: float, first: Check) -> None:
        self.launch = launch
        self.timeout = timeout
        self.rank = launch.rank if launch else 0
        self.checks = [first]
        self.doing = "launch"
        self.record: dict[str, Any] = {
            "rank": self.rank,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "node_rank": -1,  # not known before the ranks have joined
            "local_rank": -1,
            "device": "",
            "versions": installed(),
        }
        self.peers: dict[int, tuple[dict[str, Any], list[Check]]] = {}
        self._deadline = time.monotonic() + timeout
        self._shared = 0

    @property
    def world_size(self) -> int:
        """Return the number of ranks, 1 without a job."""
        return self.launch.world_size if self.launch else 1

    @property
    def records(self) -> list[dict[str, Any]]:
        """List the records of all ranks, [] before they have joined."""
        records = [self.peers[rank][0] for rank in sorted(self.peers)]
        return records if len(records) == self.world_size and records[0]["device"] else []

    def time_left(self) -> timedelta:
        """Return the rest of the time-out, in whole seconds, at least one."""
        return timedelta(seconds=max(1, math.ceil(self._deadline - time.monotonic())))

    def begin(self, name: str, text: str) -> None:
        """Note the name of the check that begins and would fail, and tell the person what it does."""
        self.doing = name
        if self.rank == 0:
            announce(text)

    def add(self, check: Check) -> None:
        """Add a result."""
        self.checks.append(check)

    def has_failed(self, name: str) -> bool:
        """Return whether a check of this process has failed."""
        return any((check.name, check.status) == (name, "failed") for check in self.checks)

    def attempt(self, name: str, probe: Callable[..., Check], *args: Any) -> None:
        """Run a check; if it cannot run, report that as its result."""
        try:
            self.add(probe(*args))
        except Exception as error:
            self.add(Check(name, "skipped", f"cannot be checked here: {describe_error(error)}"))

    def fail(self, error: Exception) -> None:
        """Add the failure of the check that runs now: the error's first line, and its last ones as details."""
        first, *rest = str(error).strip().splitlines() or [""]
        is_own = type(error).__module__.startswith("ddpkit")
        found = first if is_own else f"{type(error).__name__}: {first}"
        remedy = _REMEDIES.get(self.doing, _OTHER_REMEDY)
        self.add(Check(self.doing, "failed", found, remedy, rest[-_MANY_LINES:]))

    def skip_rest(self, reason: str) -> None:
        """Mark as skipped all checks of a job that have not run."""
        done = {check.name for check in self.checks}
        missing = [name for name in _OF_A_JOB if name not in done] if self.launch else []
        self.checks += [Check(name, "skipped", reason) for name in missing]

    def share(self, store: dist.Store) -> None:
        """Exchange results with the other ranks in the store, so that rank 0 reports them even if ranks cannot join.

        Raises:
            LaunchError: If ranks do not come in time; it names them. If the store has gone.
        """
        self._shared += 1
        deadline = self._deadline
        if self._shared > 1:  # all have joined; what came since may have taken long
            deadline = time.monotonic() + self.timeout
        keys = [f"{MARK}/{self._shared}/{rank}" for rank in range(self.world_size)]
        try:
            store.set(keys[self.rank], json.dumps({"record": self.record, "checks": list(map(asdict, self.checks))}))
            pause = Pause()
            while time.monotonic() < deadline and not store.check(keys):
                pause()
            missing = [rank for rank, key in enumerate(keys) if not self._read(store, rank, key)]
        except LaunchError:
            raise
        except RuntimeError as error:
            raise LaunchError("The store is closed, because rank 0 has ended: see its report.") from error
        if missing:
            raise LaunchError(
                f"{name_ranks(missing).capitalize()} of {len(keys)} did not come within {self.timeout:g} s. "
                "Check that each one is running, with this MASTER_ADDR and MASTER_PORT."
            )

    def _read(self, store: dist.Store, rank: int, key: str) -> bool:
        """Take in the results of a rank; return false if there are none."""
        if not store.check([key]):
            return False
        self.peers[rank] = read_results(store.get(key), key, rank)
        return True

    def merged(self) -> list[Check]:
        """Return the results of all ranks that are known, a common finding once."""
        by_rank = {rank: checks for rank, (_, checks) in self.peers.items()}
        hosts = {rank: record["host"] for rank, (record, _) in self.peers.items()}
        hosts[self.rank] = self.record["host"]
        return merge(by_rank | {self.rank: self.checks}, hosts)


def read_results(text: bytes | str, key: str, rank: int) -> tuple[dict[str, Any], list[Check]]:
    """Read another rank's record and results, which came from this key of the store.

    Raises:
        LaunchError: If that rank did not write them.
    """
    report = parse(text, key, {"record": _RECORD, "checks": [_CHECK]})
    has_odd_status = any(entry["status"] not in STATUSES for entry in report["checks"])
    if has_odd_status or report["record"]["rank"] != rank:
        refuse_text(text, key)
    return report["record"], [Check(**entry) for entry in report["checks"]]


# Merge the results of a job's ranks.


def merge(by_rank: dict[int, list[Check]], hosts: dict[int, str]) -> list[Check]:
    """Merge the results of a job's ranks, by the checks and the host of each, so that a common finding is said once."""
    by_name: dict[str, list[tuple[int, Check]]] = {}
    for rank, checks in sorted(by_rank.items()):
        for check in checks:
            by_name.setdefault(check.name, []).append((rank, check))
    merged = []
    for results in by_name.values():  # the first of the worst, with a line for each other finding
        ranks_with: dict[tuple[str, str], list[int]] = {}
        for rank, check in results:
            ranks_with.setdefault((check.status, check.found), []).append(rank)
        check = max((check for _, check in results), key=lambda check: STATUSES.index(check.status))
        ranks = ranks_with.pop((check.status, check.found))
        others = [f"{_say_ranks(some, hosts)}: {found}" for (_, found), some in ranks_with.items()]
        found = check.found
        if others and check.status != "ok":
            found = f"{_say_ranks(ranks, hosts)}: {found}"
        merged.append(replace(check, found=found, details=[*check.details, *first_of(others, _MANY_LINES)]))
    return merged


def _say_ranks(ranks: list[int], hosts: dict[int, str]) -> str:
    """Name ranks and their hosts: "ranks 0, 1, 5 (a, b)"."""
    names = list(dict.fromkeys(hosts[rank] for rank in ranks))
    return f"{name_ranks(ranks)} ({', '.join(first_of(names, _MANY_HOSTS))})"


# Print the report, for people or as JSON.


def print_report(report: Report, as_json: bool) -> int:
    """Print the report; rank 0 does for all if it has heard of them. Return the exit code."""
    checks = report.merged()
    if report.rank == 0:
        subject = f"this machine, {report.record['host']}"
        if report.launch:
            subject = f"the job of {count(report.world_size, 'rank')}"
        if as_json:
            print(_as_json(report, checks), flush=True)
        else:
            show(render(f"ddpkit doctor: {subject}", checks))
    elif 0 not in report.peers:  # rank 0 cannot speak for this one
        for check in checks:
            if check.status == "failed":
                where = f"rank {report.rank} ({report.record['host']})"
                show(f"ddpkit doctor: {where}: {check.name}: {check.found} {check.remedy}", on_stderr=True)
    return int(worst(checks) == "failed")


def _as_json(report: Report, checks: Sequence[Check]) -> str:
    fields = {
        "schema": SCHEMA,
        "scope": "job" if report.launch else "machine",
        "status": worst(checks),
        "host": report.record["host"],
        "world_size": report.world_size,
        "versions": report.record["versions"],
        "checks": [asdict(check) for check in checks],
        "ranks": report.records,
    }
    return json.dumps(fields, indent=2)


def render(title: str, checks: Sequence[Check]) -> str:
    """Write a report for stdout: aligned, and coloured on a terminal."""
    lines = [paint(title, "bold"), ""]
    name_width = max(len(check.name) for check in checks)
    for check in checks:
        head = f"{check.status:<9}{check.name:<{name_width}}  "
        texts = [check.found, *check.details]
        if check.remedy:
            texts.append(f"-> {check.remedy}")
        first, *more = wrap(texts, len(head))
        lines.append(paint(head, _COLOURS[check.status]) + first)
        lines += [" " * len(head) + line for line in more]
    return "\n".join([*lines, "", paint(tally(checks), _COLOURS[worst(checks)])])


def tally(checks: Sequence[Check]) -> str:
    """Count the checks of each status, and name the bad ones: "2 ok, 1 failed (ports)"."""
    parts = []
    for status in STATUSES:
        names = [check.name for check in checks if check.status == status]
        number = count(len(names), status) if status == "warning" else f"{len(names)} {status}"
        if status in ("warning", "failed"):
            number += f" ({', '.join(names)})"
        if names:
            parts.append(number)
    return ", ".join(parts)
