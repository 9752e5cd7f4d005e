"""The paces of all ranks, as rank 0 gathers them every few seconds."""

from __future__ import annotations

import time

from .clock import StepClock
from .pace import BLOCKS, Pace, SlowRank, find_slow_rank

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
