"""Collect the results of checks: those of this process and, in a job, those of the other ranks."""

from __future__ import annotations

import json
import math
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ...collectives.differences import name_ranks
from ...errors import LaunchError
from ...join.store_values import Pause, parse, refuse_text
from ...launch.launch import Launch
from ..terminal import announce
from .check import STATUSES, Check, failure

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
