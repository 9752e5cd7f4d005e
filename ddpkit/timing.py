"""The clock of this process's training steps: how long each part of them takes.

Nothing is synchronised and nothing is sent. Who begins a part says so, and the time until the next part begins is its.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, get_type_hints

import numpy as np

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


# The pace of a rank: how long the phases of its last steps took; and which rank makes the others wait.

BLOCKS = 8  # that are compared: of 40 steps
# as shares of the work of the others' steps
_SHARE = 0.08  # by which a slow rank works longer in one phase, or by which the others wait for it
_HELD = 0.03  # by which they wait for it in any case
_LEAST = 0.0005  # seconds per step by which they wait for it in any case
_OFTEN = 0.75  # share of the blocks in which it is so, at least by half


@dataclass(frozen=True)
class Pace:
    """How long the phases of a rank's last steps took.

    Attributes:
        rank: The rank.
        last: Number of the last block of steps.
        seconds: By block and phase.
    """

    rank: int
    last: int
    seconds: tuple[tuple[float, ...], ...]

    @classmethod
    def of(cls, rank: int, clock: StepClock, last: int) -> Pace | None:
        """Read the clock of a rank; None where it does not have the blocks up to this one."""
        seconds = clock.window(last, BLOCKS)
        if seconds is None:
            return None
        return cls(rank, last, tuple(tuple(round(each, 6) for each in block) for block in seconds))

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> Pace | None:
        """Make it of fields that have the form `PACE`; None if they are none of a pace."""
        seconds = tuple(map(tuple, fields["seconds"]))
        if len(seconds) != BLOCKS:
            return None
        for block in seconds:
            if len(block) != len(Phase) or not all(0 <= each < math.inf for each in block):
                return None
        return cls(fields["rank"], fields["last"], seconds)

    def per_step(self) -> dict[str, float]:
        """Return the seconds of each phase in a step, the median of the blocks."""
        medians = np.median(np.array(self.seconds), axis=0) / STEPS
        return {phase.label: float(medians[phase]) for phase in Phase}


PACE = get_type_hints(Pace)  # the form of its JSON


@dataclass(frozen=True)
class SlowRank:
    """A rank for which the others wait.

    Attributes:
        rank: The rank.
        share: By how much it makes a step longer, as a share of what the step would take without.
        phase: In which of its phases it takes longest, compared with the others.
        seconds: That it takes there, per step.
        others: Seconds that the others take there, per step, their median.

    Example:
        >>> print(SlowRank(3, share=0.25, phase="data", seconds=0.06, others=0.01))
        makes every step 25 % longer: its data take 60.0 ms, the others' 10.0 ms
    """

    rank: int
    share: float
    phase: str
    seconds: float
    others: float

    def __str__(self) -> str:
        phase = {"data": "its data take", "other": "what else it does takes"}.get(self.phase, f"its {self.phase} takes")
        mine, theirs = milliseconds(self.seconds), milliseconds(self.others)
        return f"makes every step {100 * self.share:.0f} % longer: {phase} {mine} ms, the others' {theirs} ms"


def milliseconds(seconds: float) -> str:
    """Write a time in milliseconds, without their unit."""
    text = f"{1000 * seconds:.1f}"
    return text if len(text) < 5 else f"{1000 * seconds:.0f}"


def find_slow_rank(paces: Sequence[Pace]) -> SlowRank | None:
    """Find the rank for which the others wait, in the same steps of all of them; None if there is none.

    Ranks that exchange gradients leave that exchange together. So the rank that waits least there is the last to come,
    and the others' wait, beyond its own, is what it costs them. No two clocks are compared.

    Args:
        paces: Of all ranks, for the same blocks.
    """
    if len(paces) < 2:
        return None
    seconds = np.array([pace.seconds for pace in paces])  # by rank, block and phase
    waiting = seconds[:, :, Phase.WAITING]
    own = np.delete(seconds, Phase.WAITING, axis=2)
    slow = int(np.median(waiting, axis=1).argmin())
    usual = _of_others(own, slow)
    work = max(float(np.median(usual.sum(axis=1))), 1e-9)
    held = _of_others(waiting, slow) - waiting[slow]
    longer = own[slow] - usual
    if np.median(held) < max(_HELD * work, _LEAST * STEPS) or not _is_clear(np.column_stack([held, longer]) / work):
        return None
    by_phase = np.median(longer, axis=0)
    worst = int(by_phase.argmax())
    if by_phase.clip(min=0).sum() < np.median(held) / 2:  # its own work does not explain it
        return None
    phases = [phase.label for phase in Phase if phase != Phase.WAITING]
    step = np.median(seconds.sum(axis=2), axis=0)
    return SlowRank(
        paces[slow].rank,
        share=float(np.median(held / np.maximum(step - held, 1e-9))),
        phase=phases[worst],
        seconds=float(np.median(own[slow, :, worst])) / STEPS,
        others=float(np.median(usual[:, worst])) / STEPS,
    )


def _is_clear(shares: np.ndarray[Any, Any]) -> bool:
    """Return whether one of the columns, of shares by block, is large, and so in most blocks."""
    large = np.median(shares, axis=0) >= _SHARE
    often = np.mean(shares > _SHARE / 2, axis=0) >= _OFTEN
    return bool(np.any(large & often))


def _of_others(values: np.ndarray[Any, Any], rank: int) -> np.ndarray[Any, Any]:
    """Return the median over all ranks but one."""
    medians: np.ndarray[Any, Any] = np.median(np.delete(values, rank, axis=0), axis=0)
    return medians


# The paces of all ranks, as rank 0 gathers them every few seconds.

_PERIOD = 2.0  # seconds, at least, between two questions
_PATIENCE = 60.0  # seconds until the next one if somebody has not answered
_ANSWERS = 500  # that rank 0 takes in a second
_PAUSE = 600.0  # seconds until the same is said again of a rank


class Paces:
    """What the ranks have answered about their last steps.

    Args:
        world_size: Number of ranks in the job.

    Attributes:
        latest: Of all ranks, for the same steps.
        slow: The rank for which the others waited in these, None if there was none.
    """

    def __init__(self, world_size: int) -> None:
        self.latest: list[Pace] = []
        self.slow: SlowRank | None = None
        self._world_size = world_size
        self._period = max(_PERIOD, world_size / _ANSWERS)
        self._asked = 0  # for the blocks up to this one
        self._asked_at = 0.0
        self._answers: dict[int, Pace] = {}
        self._before: SlowRank | None = None  # in the steps that were asked for before
        self._said: dict[tuple[int, str], float] = {}  # when it was last said of a rank and a phase

    def next_question(self, clock: StepClock) -> int | None:
        """Return the number of the block up to which the ranks are to be asked now; None if there is nothing new."""
        now = time.monotonic()
        last = clock.blocks - 1  # which the others have ended, too: they are at most a step behind
        is_answered = len(self._answers) == self._world_size or self._asked == 0
        pause = self._period if is_answered else _PATIENCE  # a rank that is stopped need not find a pile of questions
        if not clock.is_comparable or last < max(BLOCKS, self._asked + 1) or now < self._asked_at + pause:
            return None
        self._asked = last
        self._asked_at = now
        self._answers.clear()
        return last

    def add(self, pace: Pace) -> None:
        """Take in an answer; with the last one see which rank is slow."""
        if pace.last != self._asked:
            return
        self._answers[pace.rank] = pace
        if len(self._answers) == self._world_size:
            self.latest = [self._answers[rank] for rank in range(self._world_size)]
            self._before = self.slow
            self.slow = find_slow_rank(self.latest)

    def news(self) -> SlowRank | None:
        """Return the slow rank if it is to be said now.

        It has been slow twice in the same phase, and this was not said in the last ten minutes.
        """
        slow, before = self.slow, self._before
        if slow is None or before is None or (slow.rank, slow.phase) != (before.rank, before.phase):
            return None
        now = time.monotonic()
        if now < self._said.get((slow.rank, slow.phase), -_PAUSE) + _PAUSE:
            return None
        self._said[slow.rank, slow.phase] = now
        return slow
