"""What the ranks of a joined job tell each other outside collectives: they meet, and they fail, over torch's key-value
store.

A *meeting* is a wait for several ranks that can name who is missing. The first *failure* of a job is recorded, and
every wait looks at the record, so that nobody waits for a rank that will not come.
"""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from types import NoneType, UnionType
from typing import Any, NoReturn, TypeVar, Union, cast, get_args, get_origin

import torch.distributed as dist

from ..errors import BarrierTimeoutError, DdpkitError, LaunchError, PeerError
from .polling import Pause, aside

T = TypeVar("T")
_WORD, _BROKEN = 60, 1 << 61  # a meeting's counters: one bit for each of 60 ranks, and a flag, in an int64
_PATIENCE = timedelta(seconds=1.5)  # in which the watch learns why a connection broke
_AT_ONCE = timedelta(seconds=5)  # bound on a wait for a key whose writer is at work
_LONG = 1.0  # seconds of a wait after which a rank notes where it waits
_LONGEST = 8 << 20  # bytes that the store takes at once; it has more only if somebody appends
_MESSAGE, _TRACE = 10_000, 50_000  # characters of a failure: the store drops connections over values of megabytes
FAILURE = {"rank": int, "host": str, "type": str, "message": str, "traceback": str}
_MISSING = {"missing": [int], "seconds": float, "elsewhere": dict[str, str]}


def parse(text: bytes | str, key: str, *shapes: Mapping[str, Any]) -> dict[str, Any]:
    """Read a JSON object from the store, where any program that reaches the port may write.

    Args:
        text: Bytes that the store gave.
        key: Their key, for the error.
        *shapes: Name and type of each field, one mapping for each form that is right; `[int]` is a list of ints.

    Raises:
        LaunchError: If the text has none of these forms.
    """
    if len(text) > _LONGEST:
        refuse_text(text, key)
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        refuse_text(text, key)
    if not any(_fits(found, shape) for shape in shapes):
        refuse_text(text, key)
    return dict(found)


def refuse_text(text: bytes | str, key: str) -> NoReturn:
    """Raise `LaunchError`: no rank of this job wrote this text."""
    shown = repr(text[:60]) + ("…" if len(text) > 60 else "")
    raise LaunchError(
        f"The store holds {shown} under {key!r}, which no rank of this job wrote. "
        "Does another program use this MASTER_ADDR and MASTER_PORT? Give each job a port of its own."
    )


def add(store: dist.Store, key: str, amount: int) -> int:
    """Add to a counter of the store and return the sum.

    The store drops the connection of whoever adds to a text. So that nobody takes it for the end of its host, the key
    is read over another connection.

    Raises:
        LaunchError: If the key holds no number: no rank wrote it.
    """
    try:
        return int(store.add(key, amount))
    except (RuntimeError, ValueError):
        text = _read_anew(store, key)
        if text is not None and not re.match(rb"\s*[+-]?[0-9]{1,18}(?![0-9])", text):
            refuse_text(text, key)
        raise


def _read_anew(store: dist.Store, key: str) -> bytes | None:
    """Read a key over a connection of its own; None if there is none to be had, and in torch 2.6, which cannot."""
    base = store
    while isinstance(base, dist.PrefixStore):
        base = base.underlying_store

    def read() -> bytes | None:
        again = cast(Any, store).clone()
        return bytes(again.get(key)) if again.check([key]) else None

    try:
        if isinstance(base, dist.TCPStore):  # torch would go on trying for the whole time-out
            socket.create_connection((base.host, base.port), timeout=2).close()
        return aside(read, 3.0)
    except (AttributeError, OSError, RuntimeError, ValueError):
        return None


def _fits(value: Any, hint: Any) -> bool:
    """Say whether a value that was JSON has a type, or the form of a mapping from names to types, or of `[type]`."""
    if isinstance(hint, Mapping):
        named = isinstance(value, dict) and value.keys() == hint.keys()
        return named and all(_fits(value[name], hint[name]) for name in hint)
    if isinstance(hint, list):
        return isinstance(value, list) and all(_fits(each, hint[0]) for each in value)
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(_fits(value, choice) for choice in args)
    if origin is dict:
        return isinstance(value, dict) and all(_fits(each, args[1]) for each in value.values())
    if origin is tuple and args[-1] is Ellipsis:
        return _fits(value, [args[0]])
    if origin is tuple:
        return isinstance(value, list) and len(value) == len(args) and all(map(_fits, value, args))
    return type(value) is (NoneType if hint is None else hint)  # a bool is no int


def failure_record(rank: int, error: BaseException) -> dict[str, Any]:
    """Make what the other ranks are told of a failure; rank -1 when the job itself is wrong."""
    if isinstance(error, PeerError):  # it only passes on what became of a peer
        words = {"type": error.error_type, "message": error.message, "traceback": error.traceback}
        return {"rank": error.rank, "host": error.host, **words}
    words = {"type": type(error).__name__, "message": message_of(error), "traceback": trace_of(error)}
    return {"rank": rank, "host": socket.gethostname(), **words}


def message_of(error: BaseException, length: int = _MESSAGE) -> str:
    """Make the text of an exception, shortened to `length` characters, also where its own `__str__` raises."""
    try:
        text = str(error)
    except BaseException as broken:  # SystemExit too: what matters is the error that we are asked about
        text = f"(no message: its __str__ raises {type(broken).__name__})"
    return _printable(text[:length])


def trace_of(error: BaseException) -> str:
    """Format the traceback, "" for an error that was never raised; shortened in the middle if it is long."""
    if error.__traceback__ is None:
        return ""
    try:
        lines = traceback.format_exception(type(error), error, error.__traceback__)
    except BaseException:  # an exception may hold anything, and the formatter of a SyntaxError trusts its fields
        lines = [*traceback.format_tb(error.__traceback__), f"{type(error).__name__}: {message_of(error)}\n"]
    text = "".join(lines)
    if len(text) > _TRACE:
        half = _TRACE // 2
        text = f"{text[:half]}\n…\n{text[-half:]}"
    return _printable(text)


def _printable(text: str) -> str:
    """Write out what no encoding has, such as the halves of a broken file name."""
    return text.encode(errors="backslashreplace").decode()


def as_error(record: dict[str, Any]) -> DdpkitError:
    """Make the exception that a failure record stands for on the other ranks."""
    message, trace = record["message"][:_MESSAGE], record["traceback"][-2 * _TRACE :]
    if record["rank"] < 0:
        return LaunchError(message)
    return PeerError(record["rank"], record["host"][:_MESSAGE], record["type"][:_MESSAGE], message, trace)


class Session:
    """One start of a job, seen from one rank: who is in it, where they meet, what failed first."""

    def __init__(self, store: dist.Store, rank: int, hosts: Sequence[str], timeout: timedelta) -> None:
        self.store, self.rank, self.hosts, self.timeout = store, rank, hosts, timeout
        self.nodes: Sequence[object] = hosts  # each rank's, to compare: several may bear one host name
        self.everyone: Sequence[int] = range(len(hosts))
        self.pid = os.getpid()  # a forked child holds a copy that is not its own
        self.told: dict[str, Any] | None = None  # the failure that this rank has heard of
        self.handled = False  # whether this rank has reported it or is leaving, so that it is raised no more
        self.left: list[int] = []  # ranks that the watch saw leave
        self.reasons: dict[int, dict[str, Any]] = {}  # the failure that a rank handled when it left
        self.ending: dict[int, float] = {}  # ranks whose process is about to end, and until when to wait for its code
        self._deadlines: dict[int, float] = {}  # of the wait that each thread is in
        self.judged: BaseException | None = None  # the broken collective whose cause was looked for last
        self.compared = False  # whether the ranks have met over a broken collective
        self.orphaned: Callable[[], str] = str  # what became of the process that must outlive this one, "" if it lives
        self.connections: set[int] = set()  # those of the process group, to be cut when the job has failed
        self._counts: dict[str, int] = {}
        self._litter: dict[str, tuple[float, list[str]]] = {}  # by a meeting's name: when it was, and keys to delete
        self._sweeping = threading.Lock()

    @property
    def deadline(self) -> float | None:
        """Return the end of the wait that this rank is in, the first of its threads'; None if it is in none."""
        return min(list(self._deadlines.values()), default=None)

    def count(self, name: str) -> str:
        """A key for the n-th use of a name; every rank counts alike because all take part."""
        self._counts[name] = number = self._counts.get(name, 0) + 1
        return f"{name}/{number}"

    def record(self, failure: dict[str, Any]) -> dict[str, Any]:
        """Records this failure, or returns the one that came first."""
        return parse(self.store.compare_set("failure", "", json.dumps(failure)), "failure", FAILURE)

    def announce(self, failure: dict[str, Any], patience: float = 2.0) -> None:
        """Records this failure, for those that hear of it through the store."""
        with suppress(RuntimeError, TimeoutError):  # the store has gone, or its host is stopped
            aside(lambda: self.record(failure), patience)

    def check(self) -> None:
        """Raises if any rank has failed."""
        self._look()
        self.check_told()

    def check_told(self) -> None:
        """Raises if this rank has heard that any rank has failed; does not ask the store."""
        if self.told:
            raise as_error(self.told)

    def _look(self) -> dict[str, Any] | None:
        if self.told is None and self.store.check(["failure"]):
            self.told = parse(self.store.get("failure"), "failure", FAILURE)
        return self.told

    def verdict(self) -> DdpkitError | None:
        """Who failed or left, as far as that is known soon: the cause of a broken connection."""
        look = self.check
        with self._deadline(_PATIENCE) as end:
            while time.monotonic() < max([end, *self.ending.values()]):
                try:
                    look()
                except DdpkitError as error:
                    return error
                except RuntimeError:  # the store has gone too: only the watch can tell
                    look = self.check_told
                if orphan := self.orphan():
                    return orphan
                if self.left:
                    return self.departed(self.left[0])
                time.sleep(0.01)
        return None

    def orphan(self) -> PeerError | None:
        """What to raise when the process that must outlive this rank has gone; None as long as it lives."""
        words = self.orphaned()
        return PeerError(self.rank, self.hosts[self.rank], "orphaned", words) if words else None

    def departed(self, rank: int) -> DdpkitError:
        """What to raise when waiting for a rank that has left."""
        if rank in self.reasons:
            return as_error(self.reasons[rank])
        return PeerError(rank, self.hosts[rank], "left", "it called teardown() or ended while others still wait for it")

    @contextmanager
    def bounded(self, timeout: timedelta) -> Iterator[None]:
        """Lets the watch end a wait in which the store itself does not answer; a lost store becomes a `PeerError`."""
        try:
            with self._deadline(timeout):
                yield
        except (dist.DistNetworkError, dist.DistStoreError) as error:
            words = f"the connection to the store that it hosts, or its agent, broke: {error}"
            raise self.verdict() or PeerError(0, self.hosts[0], "lost", words) from error

    @contextmanager
    def _deadline(self, timeout: timedelta) -> Iterator[float]:
        thread, end = threading.get_ident(), time.monotonic() + timeout.total_seconds()
        former = self._deadlines.get(thread)
        self._deadlines[thread] = end
        try:
            yield end
        finally:
            if former is None:
                del self._deadlines[thread]
            else:
                self._deadlines[thread] = former

    def until(self, ready: Callable[[], T | None], timeout: timedelta, late: Callable[[], T]) -> T:
        """Polls until `ready()` is not None; raises a peer's failure; when the time is up, `late()` decides."""
        pause, end = Pause(), time.monotonic() + timeout.total_seconds()
        while (value := ready()) is None:
            if self._look():
                if (value := ready()) is not None:  # the peer failed after it had come here
                    break
                self.check()
            if time.monotonic() > end:
                return late()
            pause()
        return value

    def meet(
        self,
        key: str,
        timeout: timedelta | None = None,
        *,
        ranks: Sequence[int] | None = None,
        failure: dict[str, Any] | None = None,
        litter: Sequence[str] = (),
        refusal: str = "",
    ) -> None:
        """Waits until all of `ranks` are here. With a `failure`, tells the others instead and does not wait.

        A rank that cannot come, for it does not know the key, may put its failure under the key `refusal`.
        Keys in `litter` are deleted when the ranks next meet under this name, for then nobody can still be reading
        them; or after the time-out, for a name may be used once. Other threads may meet under other names meanwhile.
        """
        ranks, timeout = self.everyone if ranks is None else ranks, timeout or self.timeout
        place = ranks.index(self.rank)
        words = [f"{key}/{first}" for first in range(0, len(ranks), _WORD)]
        full = [(1 << min(_WORD, len(ranks) - first)) - 1 for first in range(0, len(ranks), _WORD)]

        def absent() -> list[int]:
            return [rank for i, rank in enumerate(ranks) if not bits[i // _WORD] >> i % _WORD & 1]

        def look() -> list[int]:  # the first word last: it holds the flag
            return [add(self.store, word, 0) for word in reversed(words)][::-1]

        name, note = key.rpartition("/")[0], f"waits/{self.rank}"
        noted, note_at = False, time.monotonic() + min(_LONG, timeout.total_seconds() / 2)

        def complete() -> bool | None:
            nonlocal noted
            if not noted and time.monotonic() > note_at:  # for those who miss this rank elsewhere
                self.store.set(note, name)
                noted = True
            if noted and refusal and self.store.check([refusal]):
                raise as_error(parse(self.store.get(refusal), refusal, FAILURE))
            left = list(self.left)  # before the look, because who leaves has arrived before
            bits[:] = look()
            for word, bit, whole in zip(words, bits, full, strict=True):
                if bit & ~(whole | _BROKEN):
                    refuse_text(f"{bit}", word)
            if bits[0] & _BROKEN:
                return self._judge(key, ranks)
            if bits != full and (gone := [rank for rank in left if rank in absent()]):
                self.check()  # it may have left because another failed
                raise self.departed(gone[0])
            return bits == full or None

        def late() -> bool:
            if add(self.store, f"{key}/broken", 1) == 1:  # the first reason stands
                bits[:] = [add(self.store, word, 0 if i else _BROKEN) for i, word in enumerate(words)]
                why = {"missing": absent(), "seconds": timeout.total_seconds(), "elsewhere": self._elsewhere(absent())}
                self.store.set(f"{key}/why", json.dumps(why))
            return self._judge(key, ranks)

        with self.bounded(timeout):
            if failure:  # without arriving, so that nobody finds the meeting complete
                return self._break(key, failure)
            bits = [add(self.store, words[place // _WORD], 1 << place % _WORD)]
            bits = bits if len(words) == 1 else look()
            if bits != full:
                self.until(complete, timeout, late)
                if noted:
                    self.store.delete_key(note)
            for old in self._swept(name, [*litter, *(words if place == 0 else ())]):
                self.store.delete_key(old)

    def _swept(self, name: str, litter: list[str]) -> list[str]:
        """Note the keys of this use of a name; return those that nobody reads any more."""
        now = time.monotonic()
        with self._sweeping:
            _, old = self._litter.pop(name, (now, []))
            while self._litter:
                first = next(iter(self._litter))
                since, keys = self._litter[first]
                if now < since + self.timeout.total_seconds():
                    break
                del self._litter[first]
                old = old + keys
            self._litter[name] = now, litter
        return old

    def exchange(self, text: str, name: str = "exchange", timeout: timedelta | None = None) -> list[str]:
        """Every rank's text, by rank."""
        key = self.count(name)
        with self.bounded(timeout or self.timeout):
            self.store.set(f"{key}/from/{self.rank}", _printable(text))
            self.meet(key, timeout, litter=[f"{key}/from/{self.rank}"])
            return [self._text(f"{key}/from/{rank}") for rank in self.everyone]

    def _text(self, key: str) -> str:
        data = self.store.get(key)
        try:
            return data.decode()
        except UnicodeDecodeError:
            refuse_text(data, key)

    def _elsewhere(self, missing: Sequence[int]) -> dict[str, str]:
        """Find where missing ranks wait instead, by rank."""
        notes = {f"{rank}": f"waits/{rank}" for rank in missing}
        return {rank: self._text(note) for rank, note in notes.items() if self.store.check([note])}

    def leave(self, linger: bool) -> None:
        """Counts itself out; a rank that hosts the store lingers up to 2 s for those who still need it."""

        def count_out() -> None:
            left = add(self.store, "left", 1)
            end, pause = time.monotonic() + 2.0, Pause()
            expected = len(self.hosts) - (self.told is not None and self.told["type"] == "lost")
            while linger and left < expected and time.monotonic() < end:
                pause()
                left = add(self.store, "left", 0)

        with suppress(RuntimeError, TimeoutError):  # the store has gone, or its host is stopped
            aside(count_out, 3.0)

    def _break(self, key: str, failure: dict[str, Any]) -> None:
        if add(self.store, f"{key}/broken", 1) == 1:  # the first reason stands
            add(self.store, f"{key}/0", _BROKEN)
            self.store.set(f"{key}/why", json.dumps(failure))

    def _judge(self, key: str, ranks: Sequence[int]) -> bool:
        """Raises why the meeting broke; true if the last rank came just before somebody gave up."""
        reason = f"{key}/why"
        self.until(lambda: self.store.check([reason]) or None, _AT_ONCE, lambda: refuse_text("nothing", reason))
        why = parse(self.store.get(reason), reason, FAILURE, _MISSING)
        if "missing" not in why:
            raise as_error(why)
        if not why["missing"]:
            return True
        missing, arrived = (
            [(r, self.hosts[r]) for r in ranks if (r in why["missing"]) is wanted] for wanted in (True, False)
        )
        count = f"{len(missing)} of {len(ranks)} ranks"
        text = f"{key.rpartition('/')[0]}: {count} did not arrive within {why['seconds']:g} s"
        text += f": {_names(missing)}. Arrived: {_names(arrived)}."
        for rank, place in why["elsewhere"].items():
            text += f" Rank {rank} waits in {place} instead."
        if self.rank in why["missing"]:
            text += f" This is rank {self.rank}, which came too late."
        raise BarrierTimeoutError(text, missing, arrived)


def _names(places: list[tuple[int, str]]) -> str:
    return ", ".join(f"rank {rank} ({host})" for rank, host in places) or "nobody"
