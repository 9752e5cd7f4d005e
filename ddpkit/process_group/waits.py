"""Waits for other ranks, on torch's key-value store: each has a bound and ends when a rank fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from ..errors import DdpkitError, PeerError
from ..timing.clock import Phase, StepClock
from .failures import Failures
from .polling import Pause

T = TypeVar("T")
_CAUSE_TIMEOUT = timedelta(seconds=1.5)  # time in which the monitor learns why a connection broke


def _no_monitor() -> None:
    return None


class Waits:
    """Waits of one rank, by any of its threads, for values that others write into the store.

    Args:
        store: Under the prefix of this start of the job.
        rank: This process's.
        hosts: The host name of each rank.
        orphaned: Returns what became of the process that must outlive this one, "" while it lives.

    Attributes:
        store_host: The rank that hosts the store, if one does.
        monitor: Returns the thread that can ask the other ranks, as long as there is one; a weak reference to it.
        clock: How long the parts of this rank's steps take.
    """

    def __init__(self, store: dist.Store, rank: int, hosts: Sequence[str], orphaned: Callable[[], str]) -> None:
        self.store = store
        self.rank = rank
        self.hosts = hosts
        self.store_host = 0
        self.failures = Failures(store, rank, hosts, orphaned)
        self.monitor: Callable[[], Any] = _no_monitor
        self.clock = StepClock()
        self._deadlines: dict[int, float] = {}  # of the wait that each thread is in

    @property
    def deadline(self) -> float | None:
        """Return the end of the wait that this rank is in, the first of its threads'; None if it is in none."""
        return min(list(self._deadlines.values()), default=None)

    def is_waiting(self, thread: int | None) -> bool:
        """Return whether the thread of this identity is in a wait."""
        return thread in self._deadlines

    def show_ranks(self) -> None:
        """Let rank 0 log what the ranks are doing, where a wait has been too long."""
        monitor = self.monitor()
        if monitor is not None:
            monitor.show_ranks()

    def until(self, ready: Callable[[], T | None], timeout: timedelta, late: Callable[[], T]) -> T:
        """Poll until `ready()` is not None and return that; raise a peer's failure; let `late()` decide after that."""
        pause = Pause.among(len(self.hosts) if self.rank else 1)  # for what rank 0 does then, others often wait
        deadline = time.monotonic() + timeout.total_seconds()
        failure = None
        while True:
            value = ready()
            if value is not None:
                return value
            if failure:
                raise failure.to_error()
            failure = self.failures.look_up()
            if failure:  # of a peer that may have come here before it failed
                continue
            if time.monotonic() > deadline:
                self.show_ranks()
                if self.failures.look_up():
                    continue
                value = ready()  # it may have come meanwhile
                return late() if value is None else value
            pause()

    @contextmanager
    def bounded(self, timeout: timedelta) -> Iterator[None]:
        """Let the monitor end a wait in which the store itself does not answer; raise `PeerError` for a lost store."""
        try:
            with self._deadline(timeout), self.clock.within(Phase.WAITING):
                yield
        except (dist.DistNetworkError, dist.DistStoreError) as error:
            words = f"the connection to the store that it hosts, or its agent, broke: {error}"
            host = self.store_host
            raise self.find_cause(host) or PeerError(host, self.hosts[host], "lost", words) from error

    def find_cause(self, host: int | None = None) -> DdpkitError | None:
        """Wait until it is known who failed or left: the cause of a broken connection. None if nobody did.

        Args:
            host: The rank to which the connection led, None if that is not known.
        """
        with self._deadline(_CAUSE_TIMEOUT) as deadline:
            return self.failures.find_cause(deadline, host)

    @contextmanager
    def _deadline(self, timeout: timedelta) -> Iterator[float]:
        thread = threading.get_ident()
        deadline = time.monotonic() + timeout.total_seconds()
        outer = self._deadlines.get(thread)
        self._deadlines[thread] = deadline
        try:
            yield deadline
        finally:
            if outer is None:
                del self._deadlines[thread]
            else:
                self._deadlines[thread] = outer
