"""A job that this process has joined: its members, and waits for other ranks on torch's key-value store.

Each wait has a time-out, and ends when a rank fails.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import InitVar, asdict, dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ..errors import BarrierTimeoutError, DdpkitError, PeerError, Places, printable
from ..launch.process_tree import Lost
from ..parsing import parse, refuse_text
from ..torch_internals import gloo_address
from .failures import FAILURE, Failure, Failures
from .sockets import FLUSH_SECONDS, cut, sockets_beside
from .store import count_in, polls, read_list, read_texts, try_store, write_list

_CAUSE_TIMEOUT = timedelta(seconds=1.5)  # time for the watch to learn why a connection broke
_AFTERWARDS = timedelta(seconds=10)  # time after a time-out to learn which ranks are missing
_LINGER = 2.0  # seconds that the store's host waits for ranks that are still leaving
Ranks = tuple[int, ...]  # some of a job's ranks, in an order that they all know


def _nothing(*_: object) -> None:
    return None


@dataclass(eq=False)
class Session:
    """One start of a job, as seen from one rank.

    Args:
        store: Store under the prefix of this start.
        rank: This process's rank.
        hosts: Host name of each rank.
        timeout: Default time-out of each wait.
        nodes: Node of each rank, for comparison: several may have one host name.
        peer_lost: Returns the fate of the process that must outlive this one, "" while it lives.
        explain: Explains why a collective broke.
        store_host: The rank that hosts the store, if any.
        store_connections: Those to the store, to be cut if it does not answer after a failure.

    Attributes:
        watch: Weak reference: returns the thread that can ask the other ranks, as long as it exists.
        progress: Progress of the script.
        waits: The wait for all ranks in which the main thread is: its key, its start, and when it asked the last
            question to which the answer was that ranks are missing.
        acted_at: Time of its last batch or collective.
        deadlines: By thread, the end of its current wait, and whether that is the last, which nothing prolongs.
        connections: Those of the process group, to be cut after the job has failed.
    """

    store: dist.Store
    rank: int
    hosts: Sequence[str]
    timeout: timedelta
    nodes: Sequence[object]
    peer_lost: InitVar[Lost]
    explain: Callable[[BaseException, Session], DdpkitError | None] = _nothing
    store_host: int = 0
    store_connections: set[int] = field(default_factory=set)

    def __post_init__(self, peer_lost: Lost) -> None:
        """Begin it in this process."""
        self.failures = Failures(self.store, self.rank, self.hosts, peer_lost)
        self.watch: Callable[[], Any] = _nothing
        self.progress: dict[str, int] = {}
        self.waits: tuple[str, float, float] | None = None
        self.acted_at = time.monotonic()
        self.connections: set[int] = set()
        self._pid = os.getpid()
        self.deadlines: dict[int, tuple[float, bool]] = {}
        self._counts: dict[tuple[str, Ranks | None], int] = {}  # uses of each name, by the ranks that meet
        self._used: dict[Ranks | None, list[str]] = {}  # keys of these ranks' last meeting

    @property
    def is_own(self) -> bool:
        """Return whether this process is the rank, and not a child forked from it."""
        return self._pid == os.getpid()

    def failure_of(self, error: BaseException) -> Failure:
        """Describe an error of this rank for the others."""
        return Failure.of(self.rank, error)

    def follow_connections(self, group: dist.ProcessGroup | None) -> None:
        """Store the connections of a gloo group, to be cut after the job has failed."""
        self.connections |= sockets_beside(gloo_address(group))

    def cut_connections(self, flush: bool = False) -> None:
        """Cut the process group's connections, which ends collectives; optionally after time for others to finish."""
        cut(self.connections, FLUSH_SECONDS if flush else 0.0)

    def count(self, name: str, ranks: Ranks | None = None) -> str:
        """Make a key for the n-th use of a name; all ranks count alike, because all of `ranks` take part."""
        number = self._counts.get((name, ranks), 0) + 1
        self._counts[name, ranks] = number
        if ranks is not None:
            name += f" of ranks {', '.join(map(str, ranks))}"
        return f"{name}/{number}"

    def barrier(
        self,
        key: str,
        timeout: timedelta | None = None,
        *,
        error: BaseException | None = None,
        used: Sequence[str] = (),
        ranks: Ranks | None = None,
    ) -> None:
        """Wait until all ranks are here; with an `error`, report it instead and do not wait.

        Args:
            key: Key of the barrier, from `count()`.
            timeout: Longest wait.
            error: Reason why this rank does not come.
            used: Keys to delete when these ranks meet again, so that no rank can still be reading them.
            ranks: The ranks that meet, this one included; by default all.
        """
        timeout = timeout or self.timeout
        everyone = ranks or range(len(self.hosts))
        barrier = StoreBarrier(self, everyone, key, timeout)
        with self.bounded(timeout):
            if error is not None:
                barrier.call_off(error)
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
        """Gather every rank's text on all ranks, in rank order: the first rank writes them down."""
        everyone = ranks or range(len(self.hosts))
        first = everyone[0]
        key = self.count(name, ranks)
        mine, answer = f"{key}/from/{self.rank}", f"{key}/answer"
        timeout = timeout or self.timeout
        with self.bounded(timeout):
            self.store.set(mine, printable(text))
            self.barrier(key, timeout, used=[mine], ranks=ranks)
            if self.rank == first:
                texts = read_texts(self.store, [f"{key}/from/{rank}" for rank in everyone])
                self._used[ranks] += write_list(self.store, answer, texts)
                return texts
            host = self.hosts[first]
            words = f"{name}: rank {first} ({host}) arrived, but did not answer."
            self.wait_for_key(answer, timeout, lambda: BarrierTimeoutError(words, [(first, host)], []))
            return read_list(self.store, answer, len(everyone))

    def leave(self, linger: bool) -> None:
        """Leave; a rank that hosts the store waits up to 2 s for those that still need it."""
        world_size = len(self.hosts)
        expected = world_size if linger else 0
        if self.failures.known is not None and self.failures.known.type == "lost":  # it cannot leave by itself
            expected -= 1
        try_store(lambda: count_in(self.store, "left", expected, _LINGER, world_size), _LINGER + 1.0)

    # Waits of one rank, in any of its threads, for values that others write into the store.

    @property
    def deadline(self) -> float | None:
        """Return the end of this rank's current wait, the first of its threads'; None if there is none."""
        return min((end for end, _ in list(self.deadlines.values())), default=None)

    def show_ranks(self) -> None:
        """Make rank 0 log what the ranks are doing after too long a wait."""
        watch = self.watch()
        if watch is not None:
            watch.show_ranks()

    def until(self, ready: Callable[[], bool], timeout: timedelta, late: Callable[[], DdpkitError | None]) -> None:
        """Poll until `ready()`; raise a peer's failure, or after the time-out the error that `late()` returns."""

        def look() -> bool:
            asked = time.monotonic()
            if ready():
                return True
            failure = self.failures.look_up()
            if failure is None:
                if self.waits:
                    self.waits = *self.waits[:2], asked
                return False
            if ready():  # the peer may have arrived before it failed
                return True
            raise failure.to_error()

        ranks = len(self.hosts) if self.rank else 1  # other ranks often wait for rank 0
        with self._deadline(timeout) as deadline:
            for _ in polls(deadline - time.monotonic(), ranks):
                if look():
                    return
        with self._deadline(_AFTERWARDS, is_last=True):  # the store has answered so far
            self.show_ranks()
            error = None if look() else late()  # it may have arrived meanwhile
            if error is not None:
                raise error

    def wait_for_key(self, key: str, timeout: timedelta, late: Callable[[], DdpkitError]) -> None:
        """Wait until a rank has written this key; raise a peer's failure, or `late()` after the time-out."""
        self.until(lambda: self.store.check([key]), timeout, late)

    @contextmanager
    def bounded(self, timeout: timedelta) -> Iterator[None]:
        """Let the watch end a wait in which the store does not answer; raise `PeerError` for a lost store."""
        try:
            with self._deadline(timeout):
                yield
        except (dist.DistNetworkError, dist.DistStoreError) as error:
            words = f"the connection to the store, which it or torchrun hosts, broke: {error}"
            host = self.store_host
            raise self.find_cause(host) or PeerError(host, self.hosts[host], "lost", words) from error

    def find_cause(self, host: int | None = None) -> DdpkitError | None:
        """Wait until it is known which rank failed or left and so broke a connection. None if none did.

        Args:
            host: Rank at the other end of the connection, None if unknown.
        """
        failures, look_up = self.failures, self.failures.look_up
        with self._deadline(_CAUSE_TIMEOUT) as deadline:
            while True:
                is_last_look = time.monotonic() > max([deadline, *failures.exiting.values()])
                try:
                    look_up()
                except DdpkitError as error:
                    return error
                except RuntimeError:  # the store is gone, too: only the watch can tell
                    look_up = _nothing
                cause = failures.cause(host)
                if cause or is_last_look:
                    return cause
                time.sleep(0.01)

    @contextmanager
    def _deadline(self, timeout: timedelta, is_last: bool = False) -> Iterator[float]:
        """Set the end of this thread's wait; what is inside of the last one, after a time-out, does not prolong it."""
        thread = threading.get_ident()
        deadline = time.monotonic() + timeout.total_seconds()
        outer = self.deadlines.get(thread)
        if outer is not None and outer[1]:
            deadline, is_last = min(deadline, outer[0]), True
        self.deadlines[thread] = deadline, is_last
        try:
            yield deadline
        finally:
            if outer is None:
                del self.deadlines[thread]
            else:
                self.deadlines[thread] = outer


# Barriers: waits of all ranks for each other, on torch's key-value store.
#
# Waiting ranks read one counter of the ranks that have arrived. A rank that times out or has failed breaks the barrier
# by a flag in the counter. The first of these writes the reason under `why`, which all ranks raise, late ones included.
# A roll call finds the missing ranks: ranks that were waiting when the barrier broke answer it.

_BROKEN_FLAG = 1 << 40  # a flag in the counter
_AT_ONCE = timedelta(seconds=5)  # time-out for a key that is being written
_ROLL_CALL = 3.0  # seconds in which arrived ranks must answer when a barrier has broken
_NOTED_AFTER = 1.0  # seconds of a wait after which a rank records where it waits
_FAILED = {**FAILURE, "module": str}  # of the exception's class
_MISSING = {"missing": [int], "seconds": float, "elsewhere": [tuple[int, str]]}


@dataclass
class StoreBarrier:
    """One barrier.

    Args:
        session: This rank's session.
        ranks: The waiting ranks.
        key: Key of the barrier, equal on all ranks, "name/number".
        timeout: Longest wait.
    """

    session: Session
    ranks: Sequence[int]
    key: str
    timeout: timedelta

    def __post_init__(self) -> None:
        """Make its keys."""
        self._store = self.session.store
        self.name = self.key.rpartition("/")[0]
        self.counter = f"{self.key}/arrived"
        self._note = _note_key(self.session.rank)
        self._note_at = math.inf

    def wait(self) -> None:
        """Arrive, and return when all ranks have."""
        deadline = time.monotonic() + self.timeout.total_seconds()
        count = self._store.add(self.counter, 1)
        if count == len(self.ranks) or (count >= _BROKEN_FLAG and self._explain()):
            return
        self._note_at = time.monotonic() + min(_NOTED_AFTER, self.timeout.total_seconds() / 2)
        if len(self.ranks) == len(self.session.hosts):
            now = time.monotonic()
            self.session.waits = self.key, now, now
        try:
            left = timedelta(seconds=deadline - time.monotonic())  # a slow store may have taken some
            self.session.until(self._is_complete, left, self._give_up)
        except BarrierTimeoutError:
            self._store.set(self._note, f"timed out in {self.name}")
            raise
        finally:
            self.session.waits = None
        if self._note_at == math.inf:
            self._store.delete_key(self._note)

    def call_off(self, error: BaseException) -> None:
        """Report that this rank has failed. It does not arrive, so that the barrier never looks complete."""
        if self._store.add(self.counter, _BROKEN_FLAG) < 2 * _BROKEN_FLAG:  # the first reason stands
            failure = asdict(self.session.failure_of(error))
            self._store.set(f"{self.key}/why", json.dumps({**failure, "module": str(type(error).__module__)}))

    def _is_complete(self) -> bool:
        """Return whether all have arrived; raise if that is no longer possible."""
        if time.monotonic() > self._note_at:  # for ranks that miss this one elsewhere
            self._store.set(self._note, f"waits in {self.name} instead")
            self._note_at = math.inf
        failures = self.session.failures
        left = [rank for rank in failures.left if rank in self.ranks]
        count = self._store.add(self.counter, 0)  # after the check for departures: a rank that left has arrived before
        if count >= _BROKEN_FLAG:
            self._store.set(self._present(self.session.rank), "")
            return self._explain()
        if not 0 < count <= len(self.ranks):
            refuse_text(f"{count}", self.counter)
        if count == len(self.ranks):
            return True
        if left:
            failures.look_up()
            failures.raise_if_known()  # it may have left because another failed
            raise failures.departure(left[0])
        return False

    def _give_up(self) -> None:
        """Break the barrier after the time-out."""
        self._store.set(self._present(self.session.rank), "")
        count = self._store.add(self.counter, _BROKEN_FLAG)
        if count < 2 * _BROKEN_FLAG:
            missing = self._call_roll(count - _BROKEN_FLAG)
            notes = []
            for rank in missing:
                if self._store.check([_note_key(rank)]):
                    notes.append((rank, *read_texts(self._store, [_note_key(rank)])))
            why = {"missing": missing, "seconds": self.timeout.total_seconds(), "elsewhere": notes}
            self._store.set(f"{self.key}/why", json.dumps(why))
        self._explain()

    def _call_roll(self, arrived: int) -> list[int]:
        """Return the ranks that do not answer that they wait here, too; none if all had arrived before it broke."""
        missing = list(self.ranks)
        for _ in polls(_ROLL_CALL, len(self.ranks)):
            missing = [rank for rank in missing if not self._store.check([self._present(rank)])]
            if len(missing) <= len(self.ranks) - arrived:
                break
        return missing if arrived < len(self.ranks) else []

    def _present(self, rank: int) -> str:
        return f"{self.key}/present/{rank}"

    def _explain(self) -> bool:
        """Raise why the barrier broke; return True if the last rank arrived just before another timed out."""
        reason = f"{self.key}/why"
        words = f"{self.name}: a rank timed out and ended before it gave the reason."
        self.session.wait_for_key(reason, _AT_ONCE, lambda: BarrierTimeoutError(words, [], []))
        why = parse(self._store.get(reason), reason, _FAILED, _MISSING)
        if "missing" not in why:
            failed = Failure.from_fields(why).to_error()
            failed._module = why["module"]
            raise failed
        if why["missing"]:
            raise self._timeout_error(why)
        return True

    def _timeout_error(self, why: dict[str, Any]) -> BarrierTimeoutError:
        places = [(rank, self.session.hosts[rank]) for rank in self.ranks]
        missing = [place for place in places if place[0] in why["missing"]]
        arrived = [place for place in places if place not in missing]
        count = f"{len(missing)} of {len(places)} ranks"
        text = f"{self.name}: {count} did not arrive within {why['seconds']:g} s"
        text += f": {_names(missing)}. Arrived: {_names(arrived)}."
        elsewhere = dict(why["elsewhere"])
        for rank, note in elsewhere.items():
            text += f" Rank {rank} {note}."
        if self.session.rank in why["missing"]:
            text += f" This is rank {self.session.rank}, which arrived too late."
        return BarrierTimeoutError(text, missing, arrived, elsewhere)


def _note_key(rank: int) -> str:
    """Return the key under which a rank records where it waits."""
    return f"waits/{rank}"


def _names(places: Places) -> str:
    return ", ".join(f"rank {rank} ({host})" for rank, host in places) or "nobody"
