"""Waits for other ranks, on torch's key-value store: each has a bound and ends when a rank fails."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from ..errors import BarrierTimeoutError, DdpkitError, PeerError
from ..parsing import parse, refuse_text
from .failures import FAILURE, Failure, Failures
from .store import Pause, add, read_text

T = TypeVar("T")
_CAUSE_TIMEOUT = timedelta(seconds=1.5)  # time in which the watch learns why a connection broke


def _no_watch() -> None:
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
        watch: Returns the thread that can ask the other ranks, as long as there is one; a weak reference to it.
    """

    def __init__(self, store: dist.Store, rank: int, hosts: Sequence[str], orphaned: Callable[[], str]) -> None:
        self.store = store
        self.rank = rank
        self.hosts = hosts
        self.store_host = 0
        self.failures = Failures(store, rank, hosts, orphaned)
        self.watch: Callable[[], Any] = _no_watch
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
        watch = self.watch()
        if watch is not None:
            watch.show_ranks()

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
        """Let the watch end a wait in which the store itself does not answer; raise `PeerError` for a lost store."""
        try:
            with self._deadline(timeout):
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


# Waits of all ranks for each other, on torch's key-value store: barriers, and what is built on them.
#
# Each rank adds its bit to a word, so the ranks that are missing are known. Those who wait read one counter: the
# word, or the number of full words where there are several. A rank whose time is up, or that has failed, breaks the
# barrier: the key `broken` chooses the first of several such ranks, which sets a flag in the counter and writes its
# reason under `why`. All ranks then raise that, also those that come later.

_RANKS_PER_WORD = 60  # one bit for each, in an int64
_BROKEN = 1 << 61  # a flag in the counter
_AT_ONCE = timedelta(seconds=5)  # bound on a wait for a key whose writer is at work
_LONG = 1.0  # seconds of a wait after which a rank notes where it waits
_MISSING = {"missing": [int], "seconds": float, "elsewhere": dict[str, str]}


class StoreBarrier:
    """One wait of ranks for each other.

    Args:
        waits: This rank's.
        ranks: Those that wait, in an order that they all know.
        key: The barrier's, equal on all ranks, "name/number".
        timeout: Bound on the wait.
        refusal: Key under which a rank that cannot come writes its failure; "" if there is none.
    """

    def __init__(self, waits: Waits, ranks: Sequence[int], key: str, timeout: timedelta, refusal: str) -> None:
        self._waits = waits
        self._ranks = ranks
        self._store = waits.store
        self._key = key
        self._timeout = timeout
        self._refusal = refusal
        self.name = name_of(key)
        self._full: dict[str, int] = {}  # each word's key, and its value when all its ranks have arrived
        for first in range(0, len(ranks), _RANKS_PER_WORD):
            count = min(_RANKS_PER_WORD, len(ranks) - first)
            self._full[f"{key}/{first}"] = (1 << count) - 1
        self._words = list(self._full)
        self.counters = list(self._words)
        self._counter = self._words[0]
        self._complete = self._full[self._counter]
        if len(self._words) > 1:
            self._counter = f"{key}/full"
            self._complete = len(self._words)
            self.counters.append(self._counter)
        self._note = f"waits/{waits.rank}"  # where this rank says where it waits
        self._note_at = 0.0
        self._noted = False
        self.refused = False  # by a rank that cannot come

    def wait(self) -> None:
        """Arrive, and return when all ranks have."""
        if self._arrive() == self._complete:
            return
        self._note_at = time.monotonic() + min(_LONG, self._timeout.total_seconds() / 2)
        try:
            self._waits.until(self._is_complete, self._timeout, self._give_up)
        except BarrierTimeoutError:
            self._store.set(self._note, f"has given up {self.name}")
            raise
        if self._noted:
            self._store.delete_key(self._note)

    def call_off(self, failure: Failure) -> None:
        """Tell the others that this rank has failed. It does not arrive, so that nobody finds the barrier complete."""
        if self._may_give_reason():
            add(self._store, self._counter, _BROKEN)
            self._store.set(f"{self._key}/why", failure.to_json())

    def _arrive(self) -> int:
        """Add this rank's bit to its word; return what the counter is then, 0 if it is not complete."""
        number, place = divmod(self._ranks.index(self._waits.rank), _RANKS_PER_WORD)
        word = self._words[number]
        bits = add(self._store, word, 1 << place)
        if word == self._counter:
            return bits
        if bits != self._full[word]:
            return 0
        return add(self._store, self._counter, 1)

    def _is_complete(self) -> bool | None:
        """Return True if all have arrived, None if not; raise if that cannot be any more."""
        self._say_where()
        left = list(self._waits.failures.left)  # before the look, because who leaves has arrived before
        count = add(self._store, self._counter, 0)
        if not 0 <= count & ~_BROKEN <= self._complete:
            refuse_text(f"{count}", self._counter)
        if count & _BROKEN:
            return self._explain()
        if count == self._complete:
            return True
        if left:
            self._raise_if_absent(left)
        return None

    def _raise_if_absent(self, left: list[int]) -> None:
        """Raise if one of the ranks that have left the job has not arrived."""
        absent = self._absent()
        for rank in left:
            if rank in absent:
                self._waits.failures.raise_if_any()  # it may have left because another failed
                raise self._waits.failures.departure(rank)

    def _say_where(self) -> None:
        """Note where this rank waits, if the wait is long, for those who miss it elsewhere."""
        if not self._noted and time.monotonic() > self._note_at:
            self._store.set(self._note, f"waits in {self.name} instead")
            self._noted = True
        if self._noted and self._refusal and self._store.check([self._refusal]):
            self.refused = True
            raise Failure.from_json(self._store.get(self._refusal), self._refusal).to_error()

    def _absent(self) -> list[int]:
        """Read from the words which ranks have not arrived."""
        absent = []
        for number, (word, full) in enumerate(self._full.items()):
            bits = add(self._store, word, 0)
            if bits & ~(full | _BROKEN):
                refuse_text(f"{bits}", word)
            for place in range(full.bit_length()):
                if not bits >> place & 1:
                    absent.append(self._ranks[number * _RANKS_PER_WORD + place])
        return absent

    def _give_up(self) -> bool:
        """Break the barrier, for the time is up."""
        if self._may_give_reason():
            add(self._store, self._counter, _BROKEN)
            absent = self._absent()
            seconds = self._timeout.total_seconds()
            why = {"missing": absent, "seconds": seconds, "elsewhere": self._elsewhere(absent)}
            self._store.set(f"{self._key}/why", json.dumps(why))
        return self._explain()

    def _may_give_reason(self) -> bool:
        return add(self._store, f"{self._key}/broken", 1) == 1  # the first reason stands

    def _elsewhere(self, missing: Sequence[int]) -> dict[str, str]:
        """Find what missing ranks have noted, by rank."""
        found = {}
        for rank in missing:
            note = f"waits/{rank}"
            if self._store.check([note]):
                found[f"{rank}"] = read_text(self._store, note)
        return found

    def _explain(self) -> bool:
        """Raise why the barrier broke; return True if the last rank came just before somebody gave up."""
        reason = f"{self._key}/why"

        def written() -> bool | None:
            return self._store.check([reason]) or None

        def late() -> bool:
            raise BarrierTimeoutError(f"{self.name}: a rank gave up and ended before it said why.", [], [])

        self._waits.until(written, _AT_ONCE, late)
        why = parse(self._store.get(reason), reason, FAILURE, _MISSING)
        if "missing" not in why:
            raise Failure.from_fields(why).to_error()
        if why["missing"]:
            raise self._timeout_error(why)
        return True

    def _timeout_error(self, why: dict[str, Any]) -> BarrierTimeoutError:
        me = self._waits.rank
        missing: list[tuple[int, str]] = []
        arrived: list[tuple[int, str]] = []
        for rank in self._ranks:
            places = missing if rank in why["missing"] else arrived
            places.append((rank, self._waits.hosts[rank]))
        count = f"{len(missing)} of {len(self._ranks)} ranks"
        text = f"{self.name}: {count} did not arrive within {why['seconds']:g} s"
        text += f": {_names(missing)}. Arrived: {_names(arrived)}."
        elsewhere = {int(rank): note for rank, note in why["elsewhere"].items() if rank.isdecimal()}
        for rank, note in elsewhere.items():
            text += f" Rank {rank} {note}."
        if me in why["missing"]:
            text += f" This is rank {me}, which came too late."
        return BarrierTimeoutError(text, missing, arrived, elsewhere)


class UsedKeys:
    """Keys of earlier barriers, to be deleted once nobody reads them.

    When the ranks meet again under a name, all have left the barrier before. A name may be used once, so its keys go
    after the time-out, too. Threads may meet under different names at the same time.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._used: dict[str, tuple[float, list[str]]] = {}  # by a barrier's name: when it was, and its keys

    def replace(self, name: str, keys: list[str], timeout: timedelta) -> list[str]:
        """Note the keys of this use of a name; return those that nobody reads any more."""
        now = time.monotonic()
        with self._lock:
            _, old = self._used.pop(name, (now, []))
            while self._used:
                oldest = next(iter(self._used))
                since, more = self._used[oldest]
                if now < since + timeout.total_seconds():
                    break
                del self._used[oldest]
                old = old + more
            self._used[name] = now, keys
        return old

    def add(self, name: str, keys: list[str]) -> None:
        """Note more keys of the last use of a name."""
        with self._lock:
            if name in self._used:
                self._used[name][1].extend(keys)


def name_of(key: str) -> str:
    """Return the name of a barrier, from its key."""
    return key.rpartition("/")[0]


def _names(places: list[tuple[int, str]]) -> str:
    return ", ".join(f"rank {rank} ({host})" for rank, host in places) or "nobody"
