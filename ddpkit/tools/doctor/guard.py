"""See to it that a report is printed, alone on stdout, also where a check never ends."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ...errors import LaunchError
from .output import print_report
from .report import Report

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
