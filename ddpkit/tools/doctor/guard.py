"""See to it that a report is printed, alone on stdout, also where a check never ends."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
import sys
import textwrap
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from ...errors import LaunchError
from ..terminal import count, paint
from . import machine_checks
from .report import STATUSES, Check, Report, merge, worst

# Print the doctor's report, for people or as JSON.

SCHEMA = 1  # of the JSON object; raised when a field changes its meaning or goes away
_COLOURS = {"ok": "green", "skipped": "dim", "warning": "yellow", "failed": "red"}
_STATUS_WIDTH = max(map(len, STATUSES))
_WIDTH = 100  # columns where the output is no terminal
_WIDEST = 120


def print_report(report: Report, as_json: bool) -> int:
    """Print the report; rank 0 does for all if it has heard of them. Return the exit code."""
    checks = report.checks
    if report.peers:  # perhaps not all, if the store has gone meanwhile
        checks = merge(report.peers | {report.rank: report.checks}, report.hosts)
    code = int(worst(checks) == "failed")
    if report.rank == 0:
        if as_json:
            text = json.dumps(_as_json(report, checks), indent=2)
        else:
            text = render(f"ddpkit doctor: {_subject(report)}", checks)
        print(text.encode(sys.stdout.encoding, "backslashreplace").decode(sys.stdout.encoding))
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
        "checks": [asdict(check) for check in checks],
        "ranks": report.records,
    }


def render(title: str, checks: Sequence[Check]) -> str:
    """Write a report for stdout: aligned, and coloured on a terminal."""
    lines = [paint(title, "bold"), ""]
    name_width = max(len(check.name) for check in checks)
    for check in checks:
        lines += _lines_of(check, name_width)
    lines += ["", paint(tally(checks), _COLOURS[worst(checks)])]
    return "\n".join(lines)


def _lines_of(check: Check, name_width: int) -> list[str]:
    """Write one check: its status, its name, and in a column beside them finding and remedy."""
    head = f"{check.status.ljust(_STATUS_WIDTH)}  {check.name.ljust(name_width)}  "
    margin = " " * len(head)
    texts = [check.found, *check.details]
    if check.remedy:
        texts.append(f"-> {check.remedy}")
    first, *more = [line for text in texts for line in _wrap(text, len(head))]
    lines = [paint(head, _COLOURS[check.status]) + first]
    lines += [margin + line for line in more]
    return [line.rstrip() for line in lines]


def _wrap(text: str, margin: int) -> list[str]:
    columns = min(shutil.get_terminal_size((_WIDTH, 24)).columns, _WIDEST)
    width = max(columns - margin, 40)
    lines = textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)
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


_BEYOND_TIMEOUT = 20.0  # seconds beyond the time-out after which the process ends, wherever it stands
_NOTICE = 5.0  # seconds from a launcher's signal to the report; torchrun kills after 30


class Guard:
    """Prints a report once: when the checks have ended, or from a thread if they do not.

    Args:
        report: The report, which the checks fill.
        as_json: Print it as JSON.
    """

    def __init__(self, report: Report, as_json: bool) -> None:
        self._report = report
        self._as_json = as_json
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._stdout = -1
        self._code: int | None = None

    @contextmanager
    def checks(self) -> Iterator[None]:
        """Run checks in this block, in which nothing but the report is written to stdout."""
        sys.stdout.flush()
        self._stdout = os.dup(1)
        os.dup2(2, 1)  # C++ code may print, too
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        threading.Thread(target=self._watch, args=(reader,), daemon=True).start()
        try:
            with _signals_written_to(writer), self._outliving_sigterm():
                try:
                    yield
                finally:
                    self._ended.set()
                    os.write(writer, b"x")
        finally:
            os.dup2(self._stdout, 1)
            os.close(self._stdout)

    def print(self) -> int:
        """Print the report, once, whoever asks; return the exit code."""
        with self._lock:
            if self._code is None:
                sys.stdout.flush()
                os.dup2(self._stdout, 1)
                self._code = print_report(self._report, self._as_json)
            return self._code

    @contextmanager
    def _outliving_sigterm(self) -> Iterator[None]:
        """Outlive SIGTERM on rank 0: torchrun sends it when another rank ends with an error."""
        if self._report.launch is None or self._report.rank != 0:
            yield
            return
        former = signal.signal(signal.SIGTERM, _ignore)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, former)

    def _watch(self, reader: int) -> None:
        """Print where the main thread cannot: if it is stuck, or the launcher wants to end it."""
        seconds = self._report.timeout + _BEYOND_TIMEOUT
        reason = f"The check did not finish within {seconds:g} s."
        ready, _, _ = select.select([reader], [], [], seconds)
        if ready:
            if self._ended.wait(_NOTICE):
                return
            reason = "The check did not finish before the launcher's signal: another rank has failed."
        self._report.fail(LaunchError(reason))
        self.print()
        os._exit(1)


@contextmanager
def _signals_written_to(descriptor: int) -> Iterator[None]:
    """Write a byte to this descriptor whenever a signal comes, also while C code runs."""
    former = signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(former)


def _ignore(number: int, frame: object) -> None:
    """Do nothing: a handler, unlike SIG_IGN, lets the signal be written to the descriptor."""
