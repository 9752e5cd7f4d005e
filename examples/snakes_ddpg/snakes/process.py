"""What a program that runs for long needs, and a reader of the training loop does not: a clock, memory."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from contextlib import contextmanager

# Options of glibc's mallopt() and what to set them to
_TRIM_THRESHOLD = (-1, 2**30)  # bytes free at the top of the heap before it shrinks
_MMAP_THRESHOLD = (-3, 2**25)  # bytes from which a block is mapped on its own; this is the most


class Clock:
    """Count the `seconds` that each part of the program takes, by its name."""

    def __init__(self, *parts: str) -> None:
        self.seconds = dict.fromkeys(parts, 0.0)

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - start


def keep_freed_memory() -> None:
    """Have the C library keep what a step frees for the next one.

    Given back to the system and taken again it costs a page fault per 4 KiB: a tenth of a rank's
    time, now on this one, now on that one, and the others wait.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # not glibc
        return
    for option, size in (_TRIM_THRESHOLD, _MMAP_THRESHOLD):
        mallopt(option, size)
