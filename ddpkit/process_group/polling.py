"""Polls that slow down, and calls that are given up after a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


class Pause:
    """Sleeps between polls: by default 50 microseconds at first, 20 milliseconds in the end."""

    def __init__(self, first: float = 50e-6, longest: float = 0.02) -> None:
        self._seconds = first
        self._longest = longest

    @classmethod
    def among(cls, ranks: int) -> Pause:
        """Return pauses that leave the store time for the polls of so many ranks."""
        return cls(max(50e-6, 5e-6 * ranks), min(max(0.02, 1e-3 * ranks), 1.0))

    def __call__(self) -> None:
        """Sleep, a little longer than the last time."""
        time.sleep(self._seconds)
        self._seconds = min(1.3 * self._seconds, self._longest)


class Question:
    """Asks again and again for a yes, each time on a thread of its own, unless the last answer has not come yet.

    Args:
        ask: It may never return, because a process that it asks is stopped, or raise `RuntimeError`, which is no yes.
        seconds: That are waited for an answer.
    """

    def __init__(self, ask: Callable[[], bool], seconds: float) -> None:
        self._ask = ask
        self._seconds = seconds
        self._is_yes = False
        self._thread: threading.Thread | None = None

    def is_yes(self) -> bool:
        """Ask, if no earlier question is open, and return whether the answer was yes once."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()
        self._thread.join(self._seconds)
        return self._is_yes

    def _run(self) -> None:
        with suppress(RuntimeError):
            self._is_yes = self._ask() or self._is_yes


def _nothing() -> None:
    pass


def call_with_timeout(work: Callable[[], T], seconds: float, check: Callable[[], None] = _nothing) -> T:
    """Call a function on a thread of its own, and return its value or raise its error.

    Args:
        work: It may never return, because a process that it asks is stopped.
        seconds: Time limit; after it `TimeoutError` is raised and the thread abandoned.
        check: Called about once a second meanwhile; it ends the wait by raising.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    deadline = time.monotonic() + seconds
    try:
        thread.start()
    except RuntimeError:  # Python 3.12.0 and 3.12.1 start none at exit
        run()
    else:
        while thread.is_alive() and time.monotonic() < deadline:
            thread.join(min(deadline - time.monotonic(), 1.0))
            check()
    if errors:
        raise errors.pop()  # this frame must not keep it, for its traceback keeps the frame
    if not results:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return results[0]
