"""Agree on the step at which all ranks stop, without a collective.

Each rank counts the steps in which it could stop. When one requests a stop, rank 0 asks all for their counts; a rank
that has answered begins at most one more step before it gets the decision. The decision is the step after the furthest
one, so that no rank has passed it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace

from ..job import current_job
from .messages import StopRequest, is_below


@dataclass(eq=False)
class StopAgreement:
    """A rank's knowledge of the stop of all ranks. Its main thread counts; the watch's thread does the rest.

    Attributes:
        world_size: Number of ranks in the job.
        request: This rank's own request, or None. A signal handler may set it.
        first: On rank 0, the first request that reached it, or None.
        decision: The request with the step that rank 0 has decided, or None.
        is_asked: Whether this rank was asked for its count.
        counts: On rank 0, the counts of the ranks that answered.
    """

    world_size: int
    request: StopRequest | None = None
    first: StopRequest | None = None
    decision: StopRequest | None = None
    is_asked: bool = False
    counts: dict[int, int] = field(default_factory=dict)
    _steps: int = 0

    @property
    def is_begun(self) -> bool:
        """Return whether this rank has requested a stop, or knows of a request."""
        return self.is_asked or self.request is not None or self.decision is not None

    # Called by the main thread.

    def next_step(self) -> tuple[int, bool]:
        """Count a step; return its number, and whether the decision must be known before it begins."""
        self._steps += (
            1  # before it looks: `answer()` writes and reads in the other order, so one of them sees the other
        )
        return self._steps, self.is_asked

    def is_reached(self) -> bool:
        """Return whether this rank has counted the step at which all stop."""
        return self.decision is not None and self._steps >= self.decision.step

    # Called by the watch's thread.

    def answer(self) -> int:
        """Return the number of steps so far; no more begin before the decision."""
        self.is_asked = True
        return self._steps

    def missing(self, left: Collection[int]) -> list[int]:
        """Return, on rank 0, the ranks that have not answered but can: neither they nor a rank above them has left."""
        silent = [rank for rank in range(self.world_size) if rank not in self.counts]
        return [rank for rank in silent if not any(is_below(rank, other) for other in left)]

    def decide(self, left: Collection[int]) -> StopRequest | None:
        """Return, on rank 0, the decision, once, when all ranks that have not left have answered.

        The main thread does not know it yet: it would stop and leave before the others have been told.
        """
        if self.first is None or self.decision is not None or self.missing(left):
            return None
        return replace(self.first, step=max(self.counts.values()) + 1)


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
        current_job.watch().connections.wake()
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
