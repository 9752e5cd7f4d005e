"""Let processes in that come to take the place of lost ranks: where the job began, it tells where it is now."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from .failures import Failure
from .generation import Generation
from .regrouping import Refuge, host_store
from .sockets import is_listening
from .tcp_store import connect
from .vacancy import Notice, Vacancy

_BETWEEN_LOOKS = 0.2  # seconds
_BETWEEN_CALLS = 1.0  # seconds, at the address where the job began
_PATIENCE = timedelta(seconds=5)  # for the store there


class Door(threading.Thread):
    """The thread by which a rank lets others in, in a job that has lost some.

    Args:
        notice: What to tell them.
        tells: Whether this process tells it, where the job began.
        is_at_master: Whether it is on the host where that was, and can open a store there.
        refuge: Where they come to; None if they come to another rank.
        on_arrival: Called with the ranks that have come, at last.
        store: The one there, if this process hosts it already.

    Attributes:
        store: The one in which it tells, if this process hosts it.
    """

    def __init__(
        self,
        notice: Notice,
        tells: bool,
        is_at_master: bool,
        refuge: Refuge | None,
        on_arrival: Callable[[list[int]], None],
        store: dist.Store | None,
    ) -> None:
        super().__init__(name="ddpkit door", daemon=True)
        self._notice = notice
        self._tells = tells
        self._is_at_master = is_at_master
        self._refuge = refuge
        self._on_arrival = on_arrival
        self.store = store
        self._has_told = False
        self._acting = threading.Lock()  # so that nothing is done after `close()`
        self._over = threading.Event()
        self.start()

    def run(self) -> None:
        """Look who has come, until somebody has."""
        next_call = 0.0
        while self._is_needed() and not self._over.wait(_BETWEEN_LOOKS):
            with suppress(OSError, RuntimeError):  # what does not answer now may later
                if self._tells and time.monotonic() >= next_call:
                    next_call = time.monotonic() + _BETWEEN_CALLS
                    self._tell_at(*self._notice.master_address)
                arrived = self._refuge.arrived(self._notice.vacant) if self._refuge else []
                if arrived:
                    self._let_in(arrived)
                    break

    def _let_in(self, arrived: list[int]) -> None:
        with self._acting:
            if not self._over.is_set():
                self._on_arrival(arrived)

    def _is_needed(self) -> bool:
        return bool(self._notice.vacant) or (self._tells and not self._has_told)

    def close(self) -> dist.Store | None:
        """Let nobody in any more; return the store. The thread may take a moment to end."""
        self._over.set()
        with self._acting:
            store, self.store = self.store, None
        return store

    def _tell_at(self, host: str, port: int) -> None:
        """Refuse each start of a job there by the notice: in our own store, or in that of a new rank 0."""
        if self._has_told:
            return
        if self.store is None and is_listening(host, port):
            _refuse_start(connect(host, port, _PATIENCE), self._notice)
        elif self.store is not None or self._is_at_master:
            with self._acting:
                if self._over.is_set():
                    return
                self.store = self.store or host_store(host, port)
                Generation.refuse(self.store, _failure(self._notice))
                self._has_told = True


def _refuse_start(store: dist.Store, notice: Notice) -> None:
    """Refuse a start of which a new rank 0 hosts the store, unless it is complete: then it is another job."""
    latest = Generation.latest(store)
    if latest is None or latest.is_complete():
        return
    former = latest.vacancy()
    if former is not None and former.notice == notice.to_json():
        return
    generation = latest if former is None else Generation.new(store)
    generation.give_up(_failure(notice))


def _failure(notice: Notice) -> Failure:
    return Failure(-1, socket.gethostname(), Vacancy.__name__, str(notice), notice.to_json())
