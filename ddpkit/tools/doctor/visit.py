"""One visit of the doctor: what it has found so far, what it is doing, and the report in the end."""

from __future__ import annotations

import argparse
import json
import math
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ...errors import LaunchError
from ...launch.launchers import Launch
from ...process_group.polling import Pause
from ...process_group.session import parse, refuse_text
from ..tables import Progress
from . import job_checks, machine_checks
from .report import STATUSES, Check, failure, merge, number_of, render, worst

SCHEMA = 1  # of the JSON object; raised when a field changes its meaning or goes away
MARK = "ddpkit/doctor"  # in the store of a doctor's job
_GRACE = 20.0  # seconds beyond the time-out after which the process ends, wherever it stands
_NOTICE = 5.0  # seconds from a launcher's signal to the report; torchrun kills after 30
_TEXTS = dict.fromkeys(("name", "status", "found", "remedy"), str)
_CHECK = {**_TEXTS, "details": [str], "measured": dict[str, int | float]}  # as the ranks tell each other
_OF_A_JOB = ("master", "join", "ranks", "same versions", "mean", "latency", "clocks")
_REMEDIES = {
    "master": "Set MASTER_ADDR to a name or address of rank 0's host that every node reaches, MASTER_PORT to a port "
    "that is free there and open in the firewall, and start rank 0.",
    "join": "Start every rank with the same WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and look at the output of those "
    "that are missing. If a connection failed, see interface above.",
}
_REMEDY = (
    "If it is about a connection, see interface above. If --backend gloo or --device cpu helps, it is the "
    "accelerators' backend: NCCL_DEBUG=INFO says more."
)


def read_report(text: bytes | str, key: str) -> tuple[str, list[Check]]:
    """Read another rank's host and what it has found; raise `LaunchError` if no rank wrote it."""
    report = parse(text, key, {"host": str, "checks": [_CHECK]})
    if any(entry["status"] not in STATUSES for entry in report["checks"]):
        refuse_text(text, key)
    return report["host"], [Check(**entry) for entry in report["checks"]]


class Visit:
    """What one process has found, and in a job what the others have."""

    def __init__(self, args: argparse.Namespace, launch: Launch | None, first: Check) -> None:
        self.args, self.checks, self.doing = args, [first], "launch"
        self.launch = launch  # of the job to examine; None for this machine
        self.rank = launch.rank if launch else 0
        self.end = time.monotonic() + args.timeout
        self.progress = Progress(self.rank == 0)
        self.store: dist.Store | None = None
        self.places: list[dict[str, Any]] = []  # of all ranks, once they have joined
        self.hosts: list[str] = []
        self.peers: dict[int, list[Check]] = {}  # what each rank has found
        self._lock, self._over, self._code, self._kept = threading.Lock(), threading.Event(), -1, -1

    def left(self) -> timedelta:
        """What remains of the time-out, in whole seconds."""
        return timedelta(seconds=max(1, math.ceil(self.end - time.monotonic())))

    def begin(self, name: str, text: str) -> None:
        """Says what is done now: the name of the check that would fail, and words for who waits."""
        self.doing = name
        self.progress(text)

    def add(self, check: Check) -> None:
        self.checks.append(check)

    def fail(self, error: Exception) -> None:
        """What is being done has raised."""
        self.add(failure(self.doing, error, _REMEDIES.get(self.doing, _REMEDY)))

    def skip_rest(self, reason: str) -> None:
        """The checks of a job that have not been made cannot be."""
        done = {check.name for check in self.checks}
        self.checks += [Check(name, "skipped", reason) for name in _OF_A_JOB if name not in done]

    def post(self) -> None:
        """Leaves in the store what this rank has found, so that rank 0 can report it even if the ranks cannot join."""
        assert self.store is not None
        self.store.set(f"{MARK}/{self.rank}", self.dump())

    def dump(self) -> str:
        """Return what this rank has found, for the others."""
        return json.dumps({"host": socket.gethostname(), "checks": [check.dump() for check in self.checks]})

    def await_posts(self, world_size: int) -> None:
        """Waits for the posts of all ranks, and names those that do not come."""
        self.hosts = ["?"] * world_size
        keys, pause = [f"{MARK}/{rank}" for rank in range(world_size)], Pause()
        assert self.store is not None
        try:
            while time.monotonic() < self.end and not self.store.check(keys):
                pause()
            missing = [rank for rank, key in enumerate(keys) if not self._read_post(rank, key)]
        except LaunchError:
            raise
        except RuntimeError as error:
            raise LaunchError("The store has gone with rank 0, which has given up or died: see its report.") from error
        if missing:
            who = f"Ranks {missing} of {world_size} did not come within {self.args.timeout:g} s."
            raise LaunchError(f"{who} Are they running, with this MASTER_ADDR and MASTER_PORT?")

    def _read_post(self, rank: int, key: str) -> bool:
        if self.store is None or not self.store.check([key]):
            return False
        self.hosts[rank], theirs = read_report(self.store.get(key), key)
        self.peers[rank] = self.checks if rank == self.rank else theirs
        return True

    @contextmanager
    def kept_stdout(self) -> Iterator[None]:
        """Keeps what C++ code prints out of stdout until the report, which a thread makes if the checks never end."""
        sys.stdout.flush()
        self._kept = os.dup(1)
        os.dup2(2, 1)
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        threading.Thread(target=self._guard, args=(reader,), daemon=True).start()
        before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        if self.launch and self.rank == 0:  # torchrun sends it as soon as another rank ends with an error
            former = signal.signal(signal.SIGTERM, lambda number, frame: None)
        try:
            yield
        finally:
            self._over.set()
            os.write(writer, b"x")
            signal.set_wakeup_fd(before)
            if self.launch and self.rank == 0:
                signal.signal(signal.SIGTERM, former)
            os.dup2(self._kept, 1)
            os.close(self._kept)

    def _guard(self, reader: int) -> None:
        """Makes the report where the main thread cannot: when it is stuck, or is to be ended by the launcher."""
        why = f"did not end within {self.args.timeout + _GRACE:g} s"
        if select.select([reader], [], [], self.args.timeout + _GRACE)[0]:
            if self._over.wait(_NOTICE):
                return
            why = "did not end, and this process was told to: another rank has failed"
        self.fail(LaunchError(f"It {why}."))
        self.speak()
        os._exit(1)

    def speak(self) -> int:
        """Prints the report and returns the exit code; once, whoever asks."""
        with self._lock:
            if self._code < 0:
                self.progress.done()
                sys.stdout.flush()
                os.dup2(self._kept, 1)
                self._code = self._report()
            return self._code

    def _report(self) -> int:
        checks = merge(self.peers, self.hosts) if self.peers else self.checks
        code = int(worst(checks) == "failed")
        if self.rank != 0:
            if code and 0 not in self.peers:  # the main process cannot speak for it
                where = f"rank {self.rank} ({socket.gethostname()})"
                for check in checks:
                    if check.status == "failed":
                        print(f"ddpkit doctor: {where}: {check.name}: {check.found} {check.remedy}", file=sys.stderr)
        elif self.args.json:
            print(json.dumps(self._as_json(checks), indent=2))
        else:
            what = (
                f"the job of {number_of('rank', self.launch.world_size)}"
                if self.launch
                else f"this machine, {socket.gethostname()}"
            )
            print(render(f"ddpkit doctor: {what}", checks, sys.stdout))
        sys.stdout.flush()
        return code

    def _as_json(self, checks: list[Check]) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "scope": "job" if self.launch else "machine",
            "status": worst(checks),
            "host": socket.gethostname(),
            "world_size": self.launch.world_size if self.launch else 1,
            "versions": machine_checks.installed(),
            "checks": [check.dump() for check in checks],
            "ranks": self.places,
            "pairs": job_checks.pairs(self.places),
        }
