"""Agree at which step all ranks stop, without a collective.

Each rank counts the steps in which it could stop. When one asks for it, rank 0 asks all for their counts; a rank that
has said its own goes into one more step at most before it hears the answer. That is the step after the furthest one,
so that no rank has passed it.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Collection
from dataclasses import dataclass
from typing import get_type_hints

from ..job import current_job
from .links import is_below


@dataclass(frozen=True)
class StopRequest:
    """A rank's request that all ranks stop.

    Attributes:
        rank: The rank.
        host: The host it runs on.
        reason: Its reason, as in "got SIGTERM".
        signal: Number of the signal that it got, 0 if it asks without one.
    """

    rank: int
    host: str
    reason: str
    signal: int

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host}) {self.reason}"

    def announcement(self) -> str:
        """Say what follows from it."""
        text = f"{self}: all ranks stop after the next step or two"
        if self.signal == signal.SIGINT:
            text += "; Ctrl-C again ends at once, and saves nothing"
        return text


@dataclass(frozen=True)
class StopDecision:
    """What rank 0 tells all ranks.

    Attributes:
        step: The count of the step at which all stop.
        request: The first that rank 0 has heard of.
    """

    step: int
    request: StopRequest


class StopAgreement:
    """What a rank knows of the step at which all stop. Its main thread counts; the watch's thread does the rest.

    Args:
        world_size: Number of ranks in the job.

    Attributes:
        request: This rank's own, None while it has none. A signal handler may set it: that takes no lock.
        decision: Rank 0's, None before there is one.
        is_asked: Whether this rank has been asked for its count.
    """

    def __init__(self, world_size: int) -> None:
        self.request: StopRequest | None = None
        self.decision: StopDecision | None = None
        self.is_asked = False
        self._world_size = world_size
        self._steps = 0
        self._lock = threading.Lock()
        self._counts: dict[int, int] = {}  # on rank 0, of those that have answered
        self._first: StopRequest | None = None  # on rank 0, the one that it has heard of

    @property
    def is_begun(self) -> bool:
        """Return whether this rank has asked that all stop, or heard that one has."""
        return self.is_asked or self.request is not None or self.decision is not None

    # The main thread

    def next_step(self) -> tuple[int, bool]:
        """Count a step; return its number, and whether the decision must be known before it is begun."""
        with self._lock:
            self._steps += 1
            return self._steps, self.is_asked

    def is_reached(self) -> bool:
        """Return whether this rank has counted the step at which all stop."""
        return self.decision is not None and self._steps >= self.decision.step

    # The watch's thread

    def answer(self) -> int:
        """Return the number of steps so far; no more is begun before the decision."""
        with self._lock:
            self.is_asked = True
            return self._steps

    def begins(self, request: StopRequest) -> bool:
        """Take a request on rank 0; return whether it is the first."""
        if self._first is not None:
            return False
        self._first = request
        return True

    def add(self, rank: int, steps: int) -> None:
        """Take a rank's count on rank 0."""
        self._counts[rank] = steps

    def missing(self, left: Collection[int]) -> list[int]:
        """Return on rank 0 those that have not answered and can: they have not left, nor has one above them."""
        silent = [rank for rank in range(self._world_size) if rank not in self._counts]
        return [rank for rank in silent if not any(is_below(rank, other) for other in left)]

    def decide(self, left: Collection[int]) -> StopDecision | None:
        """Return on rank 0 the decision, once, when all have answered that have not left.

        The main thread does not know it yet: it would stop, and leave before the others have been told.
        """
        if self._first is None or self.decision is not None or self.missing(left):
            return None
        return StopDecision(max(self._counts.values()) + 1, self._first)


REQUEST = get_type_hints(StopRequest)  # the form of its JSON

_alone = StopAgreement(1)  # where no watch connects this process with other ranks


def current() -> StopAgreement:
    """Return what this process knows of the step at which all ranks of its job stop."""
    agreement: StopAgreement = current_job.watch().stop_agreement if current_job.is_watched() else _alone
    return agreement


def ask(request: StopRequest) -> bool:
    """Ask that all ranks stop, unless this one has; a signal handler may call it.

    Returns:
        Whether this is this rank's first request.
    """
    agreement = current()
    is_first = agreement.request is None
    if is_first:
        agreement.request = request
    if current_job.is_watched():
        current_job.watch().wake()
    return is_first


def forget() -> None:
    """Forget what was asked or decided where there is no watch, which keeps it as long as the job lives."""
    global _alone
    _alone = StopAgreement(1)


def _ask_again() -> None:
    """Pass on to a job that was joined a request from before."""
    if _alone.request is not None and current() is not _alone:
        ask(_alone.request)


current_job.on_join.append(_ask_again)
current_job.on_leave.append(forget)
