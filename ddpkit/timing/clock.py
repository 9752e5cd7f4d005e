"""The clock of this process's training steps: how long each part of them takes.

Nothing is synchronised and nothing is sent. Who begins a part says so, and the time until the next part begins is its.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum

STEPS = 5  # in a block, the least that is compared between ranks
_KEPT = 64  # blocks


class Phase(IntEnum):
    """A part of a training step."""

    DATA = 0
    FORWARD = 1
    BACKWARD = 2
    WAITING = 3
    OPTIMIZER = 4
    OTHER = 5

    @property
    def label(self) -> str:
        """Return its name as people read it."""
        return self.name.lower()


class StepClock:
    """Measure the phases of this process's steps.

    Attributes:
        steps: Number of steps that have ended. It is the same on ranks whose gradients travel together.
        phase: The one that has begun.
        is_comparable: Whether the gradients of all ranks of the job travel together.
    """

    def __init__(self) -> None:
        self.steps = 0
        self._counts = False
        self._thread = threading.get_ident()
        self.is_comparable = True
        self.phase = Phase.OTHER
        self._since = time.perf_counter()
        self._seconds = [0.0] * len(Phase)  # in the block that has begun
        self._blocks: deque[tuple[int, list[float]]] = deque(maxlen=_KEPT)  # with their numbers, from 1

    @property
    def blocks(self) -> int:
        """Return the number of blocks that are complete."""
        return self.steps // STEPS

    def begin(self, phase: Phase) -> Phase:
        """Begin a phase, and return the one that ends."""
        now = time.perf_counter()
        before = self.phase
        self._seconds[before] += now - self._since
        self._since = now
        self.phase = phase
        return before

    @contextmanager
    def within(self, phase: Phase) -> Iterator[None]:
        """Count the time of a block of code as that of a phase, then go on with the one before.

        In another thread it does nothing.
        """
        if threading.get_ident() != self._thread:
            yield
            return
        before = self.begin(phase)
        try:
            yield
        finally:
            self.begin(before)

    def end_step(self) -> None:
        """Count a step that has ended; the first time, begin to count: what was before was none."""
        self.begin(self.phase)
        if not self._counts:
            self._counts = True
            self._seconds = [0.0] * len(Phase)
            return
        self.steps += 1
        if self.steps % STEPS == 0:
            self._blocks.append((self.blocks, self._seconds))
            self._seconds = [0.0] * len(Phase)

    def window(self, last: int, length: int) -> list[list[float]] | None:
        """Return the seconds of each phase in so many blocks, the last of them of this number, counted from 1.

        It is None where they are not complete, or no longer kept.
        """
        found = [seconds for number, seconds in list(self._blocks) if last - length < number <= last]
        return found if len(found) == length else None
