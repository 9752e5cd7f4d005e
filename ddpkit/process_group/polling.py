"""Waiting for what may never come: polls that slow down, and calls that may not return."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Pause:
    """Sleeps between polls: 50 microseconds at first, 20 milliseconds in the end."""

    def __init__(self) -> None:
        self.seconds = 50e-6

    def __call__(self) -> None:
        time.sleep(self.seconds)
        self.seconds = min(1.3 * self.seconds, 0.02)


def aside(work: Callable[[], T], patience: float, look: Callable[[], None] = lambda: None) -> T:
    """Does work on a thread of its own and returns or raises what it does.

    Args:
        work: What may never return, because a process that it asks is stopped.
        patience: Seconds after which `TimeoutError` is raised and the thread left to itself.
        look: Called about once a second meanwhile; it ends the wait by raising.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread, end = threading.Thread(target=run, daemon=True), time.monotonic() + patience
    try:
        thread.start()
    except RuntimeError:  # Python 3.12.0 and 3.12.1 start none at exit
        run()
    else:
        while thread.is_alive() and (left := end - time.monotonic()) > 0:
            thread.join(min(left, 1.0))
            look()
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"no answer within {patience:g} s")
    return results[0]
