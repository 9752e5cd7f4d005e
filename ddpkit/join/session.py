"""A job that this process has joined: who is in it, and how its ranks meet on torch's key-value store."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from ..errors import BarrierTimeoutError, DdpkitError, printable
from ..parsing import parse, refuse_text
from ..torch_internals import gloo_address
from .causes import cause_of, lost_peer_of
from .failures import Failure
from .sockets import SETTLE, cut, sockets_beside
from .store import Pause, call_with_timeout, read_long, read_texts, write_long
from .waits import StoreBarrier, Waits

_LINGER = 2.0  # seconds that the store's host stays for ranks that are still leaving
Ranks = tuple[int, ...]  # some of a job's, in any order that they all know


class Session(Waits):
    """One start of a job, seen from one rank.

    Args:
        store: Under the prefix of this start.
        rank: This process's.
        hosts: The host name of each rank.
        timeout: Bound on each wait that names no other.
        nodes: The node of each rank, to compare: several may bear one host name.
        orphaned: Returns what became of the process that must outlive this one, "" while it lives.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        hosts: Sequence[str],
        timeout: timedelta,
        nodes: Sequence[object],
        orphaned: Callable[[], str],
    ) -> None:
        super().__init__(store, rank, hosts, orphaned)
        self.timeout = timeout
        self.nodes = nodes
        self.told: dict[str, int] = {}  # how far the script is
        self.acted_at = time.monotonic()  # when it got its last batch, or came to its last collective
        self.connections: set[int] = set()  # those of the process group, to be cut when the job has failed
        self.store_connections: set[int] = set()  # those to the store, to be cut if it does not answer after a failure
        self._pid = os.getpid()
        self._counts: dict[tuple[str, Ranks | None], int] = {}  # how often ranks that meet have used each name
        self._used: dict[Ranks | None, list[str]] = {}  # keys of the last meeting of these ranks

    @property
    def is_own(self) -> bool:
        """Return whether this process is the rank, and not a child that was forked from it."""
        return self._pid == os.getpid()

    def describe(self, error: BaseException) -> Failure:
        """Describe an error of this rank for the others."""
        return Failure.of(self.rank, error)

    def cause_of(self, error: BaseException) -> DdpkitError | None:
        """Explain why a collective broke: see `ddpkit.join.causes`."""
        return cause_of(error, self)

    def lost_peer_of(self, error: BaseException) -> DdpkitError | None:
        """Return the error that names the peer whose loss has led to this one, None if that was not the cause."""
        return lost_peer_of(error, self)

    def follow_connections(self, group: dist.ProcessGroup | None) -> None:
        """Remember the connections of a group of gloo's, to be cut when the job has failed."""
        self.connections |= sockets_beside(gloo_address(group))

    def cut_connections(self, settled: bool = False) -> None:
        """Cut those of the process group, which ends collectives; if asked, once others have had time to end theirs."""
        cut(self.connections, SETTLE if settled else 0.0)

    def count(self, name: str, ranks: Ranks | None = None) -> str:
        """Make a key for the n-th use of a name; every rank counts alike because all of `ranks` take part."""
        number = self._counts.get((name, ranks), 0) + 1
        self._counts[name, ranks] = number
        if ranks is not None:
            name += f" of ranks {', '.join(map(str, ranks))}"
        return f"{name}/{number}"

    def meet(
        self,
        key: str,
        timeout: timedelta | None = None,
        *,
        failure: Failure | None = None,
        used: Sequence[str] = (),
        ranks: Ranks | None = None,
    ) -> None:
        """Wait until all ranks are here; with a `failure`, tell the others instead and do not wait.

        Args:
            key: The barrier's, from `count()`.
            timeout: Bound on the wait.
            failure: Why this rank does not come.
            used: Keys to delete when these ranks meet again, so that nobody can still be reading them.
            ranks: Those that meet, this one among them; by default all.
        """
        timeout = timeout or self.timeout
        everyone = ranks or range(len(self.hosts))
        barrier = StoreBarrier(self, everyone, key, timeout)
        with self.bounded(timeout):
            if failure:
                barrier.call_off(failure)
                return
            barrier.wait()
            for old in self._used.pop(ranks, ()):
                self.store.delete_key(old)
            self._used[ranks] = list(used)
            if self.rank == everyone[0]:
                self._used[ranks].append(barrier.counter)

    def exchange(
        self, text: str, name: str = "exchange", timeout: timedelta | None = None, ranks: Ranks | None = None
    ) -> list[str]:
        """Give every rank's text to all, in the order of the ranks."""
        found = self.conclude(text, _shorten, name, timeout, ranks)
        expected = len(ranks or self.hosts)
        runs = parse(found, name, {"runs": [tuple[str, int]]}, values=expected)["runs"]
        if sum(count for _, count in runs) != expected or any(count < 1 for _, count in runs):
            refuse_text(found, name)
        return [one for one, count in runs for _ in range(count)]

    def conclude(
        self,
        text: str,
        conclude: Callable[[list[str]], str],
        name: str,
        timeout: timedelta | None = None,
        ranks: Ranks | None = None,
    ) -> str:
        """Give every rank's text to the first, and to all what it concludes from them.

        Args:
            text: This rank's.
            conclude: Called on the first rank with the texts in the order of the ranks.
            name: Of this use.
            timeout: Bound on the wait.
            ranks: Those that take part, this one among them; by default all.
        """
        everyone = ranks or range(len(self.hosts))
        first = everyone[0]
        key = self.count(name, ranks)
        mine, answer = f"{key}/from/{self.rank}", f"{key}/answer"
        timeout = timeout or self.timeout

        def is_there() -> bool | None:
            return self.store.check([answer]) or None

        def late() -> bool:
            host = self.hosts[first]
            raise BarrierTimeoutError(f"{name}: rank {first} ({host}) came, but gave no answer.", [(first, host)], [])

        with self.bounded(timeout):
            self.store.set(mine, printable(text))
            self.meet(key, timeout, used=[mine], ranks=ranks)
            if self.rank == first:
                texts = read_texts(self.store, [f"{key}/from/{rank}" for rank in everyone])
                conclusion = conclude(texts)
                self._used[ranks] += write_long(self.store, answer, conclusion)
                return conclusion
            self.until(is_there, timeout, late)
            return read_long(self.store, answer)

    def leave(self, linger: bool) -> None:
        """Count this rank out; a rank that hosts the store lingers up to 2 s for those who still need it."""
        with suppress(RuntimeError, TimeoutError):  # the store has gone, or its host is stopped
            call_with_timeout(lambda: self._count_out(linger), _LINGER + 1.0)

    def _count_out(self, linger: bool) -> None:
        left = self.store.add("left", 1)
        if not linger:
            return
        expected = len(self.hosts)
        failure = self.failures.known
        if failure is not None and failure.type == "lost":  # it counts itself out no more
            expected -= 1
        pause = Pause.among(len(self.hosts))
        deadline = time.monotonic() + _LINGER
        while left < expected and time.monotonic() < deadline:
            pause()
            left = self.store.add("left", 0)


def _shorten(texts: list[str]) -> str:
    """Write the texts of all ranks; equal ones in a row once, with their number."""
    return json.dumps({"runs": [(text, len(list(run))) for text, run in itertools.groupby(texts)]}, ensure_ascii=False)
