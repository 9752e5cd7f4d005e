"""Agree on the step at which all ranks stop, without a collective.

Each rank counts the steps in which it could stop. When one requests a stop, rank 0 asks all for their counts; a rank
that has answered begins at most one more step before it gets the decision. The decision is the step after the furthest
one, so that no rank has passed it.
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
        host: Its host.
        reason: Its reason, such as "got SIGTERM".
        signal: Number of the signal that it got, 0 without one.
    """

    rank: int
    host: str
    reason: str
    signal: int

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host}) {self.reason}"

    def announcement(self) -> str:
        """Describe the consequence."""
        text = f"{self}: all ranks stop after the next step or two"
        if self.signal == signal.SIGINT:
            text += "; another Ctrl-C ends this process at once, without saving"
        return text


@dataclass(frozen=True)
class StopDecision:
    """Rank 0's decision.

    Attributes:
        step: Count of the step at which all stop.
        request: The first request that reached rank 0.
    """

    step: int
    request: StopRequest


class StopAgreement:
    """A rank's knowledge of the stop of all ranks. Its main thread counts; the watch's thread does the rest.

    Args:
        world_size: Number of ranks in the job.

    Attributes:
        request: This rank's own request, or None. A signal handler may set it, because that takes no lock.
        decision: Rank 0's decision, or None.
        is_asked: Whether this rank was asked for its count.
    """

    def __init__(self, world_size: int) -> None:
        self.request: StopRequest | None = None
        self.decision: StopDecision | None = None
        self.is_asked = False
        self._world_size = world_size
        self._steps = 0
        self._lock = threading.Lock()
        self._counts: dict[int, int] = {}  # on rank 0, of the ranks that answered
        self._first: StopRequest | None = None  # on rank 0, the first request

    @property
    def is_begun(self) -> bool:
        """Return whether this rank has requested a stop, or knows of a request."""
        return self.is_asked or self.request is not None or self.decision is not None

    # Called by the main thread.

    def next_step(self) -> tuple[int, bool]:
        """Count a step; return its number, and whether the decision must be known before it begins."""
        with self._lock:
            self._steps += 1
            return self._steps, self.is_asked

    def is_reached(self) -> bool:
        """Return whether this rank has counted the step at which all stop."""
        return self.decision is not None and self._steps >= self.decision.step

    # Called by the watch's thread.

    def answer(self) -> int:
        """Return the number of steps so far; no more begin before the decision."""
        with self._lock:
            self.is_asked = True
            return self._steps

    def begins(self, request: StopRequest) -> bool:
        """Record a request on rank 0; return whether it is the first."""
        if self._first is not None:
            return False
        self._first = request
        return True

    def add(self, rank: int, steps: int) -> None:
        """Record a rank's count on rank 0."""
        self._counts[rank] = steps

    def missing(self, left: Collection[int]) -> list[int]:
        """Return, on rank 0, the ranks that have not answered but can: neither they nor a rank above them has left."""
        silent = [rank for rank in range(self._world_size) if rank not in self._counts]
        return [rank for rank in silent if not any(is_below(rank, other) for other in left)]

    def decide(self, left: Collection[int]) -> StopDecision | None:
        """Return, on rank 0, the decision, once, when all ranks that have not left have answered.

        The main thread does not know it yet: it would stop and leave before the others have been told.
        """
        if self._first is None or self.decision is not None or self.missing(left):
            return None
        return StopDecision(max(self._counts.values()) + 1, self._first)


REQUEST = get_type_hints(StopRequest)  # the form of its JSON

_alone = StopAgreement(1)  # for processes without a watch


def current() -> StopAgreement:
    """Return this process's knowledge of the stop of all ranks of its job."""
    agreement: StopAgreement = current_job.watch().stop_agreement if current_job.is_watched() else _alone
    return agreement


def ask(request: StopRequest) -> bool:
    """Request that all ranks stop, unless this one already has; safe in a signal handler.

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
    """Reset requests and decisions without a watch; a watch keeps them for the lifetime of the job."""
    global _alone
    _alone = StopAgreement(1)


def _ask_again() -> None:
    """Pass a request from before on to a job that was joined."""
    if _alone.request is not None and current() is not _alone:
        ask(_alone.request)


current_job.on_join.append(_ask_again)
current_job.on_leave.append(forget)
