"""Everything that waits for other ranks: always on the store, always with a bound, always saying for whom."""

from __future__ import annotations

import functools
import json
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import ParamSpec, TypeVar

from . import ranks, runtime
from .errors import DdpkitError
from .store import Session, as_error, failure_record

P = ParamSpec("P")
T = TypeVar("T")
_PART = 4 << 20  # bytes in one value: the store drops connections over larger ones
_WORK = timedelta(days=1)  # bound on work that one rank does while the others wait; a rank that dies is noticed at once


def barrier(name: str | None = None, timeout: timedelta | None = None) -> None:
    """Waits until every rank is here. Collective, on any backend; it leaves the accelerator's queue alone.

    Args:
        name: What to call it in errors; it may be used again. Ranks meet at the same use of the same name.
        timeout: Bound on the wait; by default that of `setup()`.

    Raises:
        BarrierTimeout: If ranks are missing when the time is up; `.missing` and `.arrived` say which, on every rank,
            also on those that come later.
        PeerError: If a rank failed or left meanwhile.

    Example:
        >>> barrier()
    """
    if timeout is not None and timeout <= timedelta(0):
        raise ValueError(f"timeout must be positive, got {timeout}.")
    if runtime.joined():
        session = runtime.current_session()
        session.meet(session.count(f"barrier {name!r}" if name else "barrier"), timeout)


def exchange(text: str) -> list[str]:
    """Every rank's text, by rank, through the store; `[text]` on one process. Collective."""
    return runtime.current_session().exchange(text) if runtime.joined() else [text]


@contextmanager
def together(name: str | None = None) -> Iterator[None]:
    """A block after which either all ranks go on or all raise. Collective.

    A rank that raises in the block keeps its exception and does not wait; the others raise when they come to the end.
    So the block may hold no collective of its own, unless its failure ends the job.

    Args:
        name: What to call it in errors.

    Raises:
        PeerError: If the block raised on another rank; it holds that rank, its exception and traceback.
        BarrierTimeout: If ranks do not come to the end in time.

    Example:
        >>> with together("read the index"):
        ...     index = list(range(3))
    """
    if not runtime.joined():
        yield
        return
    session = runtime.current_session()
    key = session.count(f"together {name!r}" if name else "together")
    try:
        yield
    except BaseException as error:
        session.meet(key, failure=failure_record(session.rank, error))
        raise
    session.meet(key)


@contextmanager
def main_process_first(local: bool = False) -> Iterator[None]:
    """A block that rank 0 runs first, and the others when it is done: to download or prepare what the others then find.

    Collective; but the block itself may hold no collective. The others wait on the store, so slow work trips no
    time-out of a collective. If the first rank raises, all raise.

    Args:
        local: Whether the first rank of every node goes first, for work on node-local disks.

    Raises:
        PeerError: If the block raised on the first rank.

    Example:
        >>> with main_process_first():
        ...     data = "read from the cache, or downloaded into it"
    """
    if not runtime.joined():
        yield
        return
    session = runtime.current_session()
    first = session.nodes.index(session.nodes[session.rank]) if local else 0
    key = f"{session.count('main_process_first')} on {first}"
    if session.rank != first:
        near = session.nodes.count(session.nodes[first]) if local else len(session.hosts)
        _outcome(session, key, first, near - 1)
        yield
        return
    try:
        yield
    except BaseException as error:
        _tell(session, key, error=error)
        raise
    _tell(session, key)


def run_on_main(fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Runs `fn` on rank 0 and gives its value to every rank. Collective; `fn` itself may hold no collective.

    Args:
        fn: Called with the arguments on rank 0 only.
        *args: Its arguments.
        **kwargs: Its keyword arguments.

    Returns:
        What it returned, as a pickled copy on the other ranks.

    Raises:
        PeerError: On the other ranks, if it raised on rank 0; rank 0 keeps the exception.

    Example:
        >>> run_on_main(sorted, [2, 1])
        [1, 2]
    """
    if not runtime.joined():
        return fn(*args, **kwargs)
    session = runtime.current_session()
    key = session.count("run_on_main")
    if session.rank != 0:
        value: T = pickle.loads(_outcome(session, key, 0, len(session.hosts) - 1))
        return value
    try:
        value = fn(*args, **kwargs)
        data = pickle.dumps(value)
    except BaseException as error:
        _tell(session, key, error=error)
        raise
    _tell(session, key, data)
    return value


def main_process_only(fn: Callable[P, T]) -> Callable[P, T | None]:
    """Decorates a function to run on rank 0 only: it returns None elsewhere, and nobody waits.

    Example:
        >>> main_process_only(print)("once")
        once
    """

    @functools.wraps(fn)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T | None:
        return fn(*args, **kwargs) if ranks.is_main_process() else None

    return wrapped


def stop_together(flag: bool) -> bool:
    """Whether any rank wants to stop; every rank gets the same answer. Collective, about as cheap as a barrier.

    Args:
        flag: Whether this rank wants to stop, for example because its data or its time has run out.

    Example:
        >>> stop_together(False)
        False
    """
    if not runtime.joined():
        return bool(flag)
    session = runtime.current_session()
    key = session.count("stop_together")
    with session.bounded(session.timeout):
        if flag:
            session.store.add(f"{key}/flags", 1)
        session.meet(key, litter=[f"{key}/flags"] if session.rank == 0 else [])
        return session.store.add(f"{key}/flags", 0) > 0


def _tell(session: Session, key: str, value: bytes = b"", error: BaseException | None = None) -> None:
    """Publishes what became of work that the others wait for."""
    with session.bounded(session.timeout):
        text = b"!" + json.dumps(failure_record(session.rank, error)).encode() if error else b"=" + value
        parts = [text[start : start + _PART] for start in range(0, len(text), _PART)]
        for number, part in enumerate(parts):
            session.store.set(f"{key}/{number}", part)  # type: ignore[arg-type]  # torch takes bytes; its stub does not know
        session.store.set(key, f"{len(parts)}")
        session.store.check([key])  # set() does not wait: the news of our leaving must not overtake it


def _outcome(session: Session, key: str, worker: int, readers: int) -> bytes:
    """Waits for what another rank publishes; raises its failure."""

    def ready() -> list[str] | None:
        left = worker in session.left  # before the look, because it tells before it leaves
        if session.store.check([key]):
            return [f"{key}/{number}" for number in range(int(session.store.get(key)))]
        if left:
            session.check()  # it may have left because another failed
            raise session.departed(worker)
        return None

    def late() -> list[str]:
        raise DdpkitError(f"Rank {worker} ({session.hosts[worker]}) did not finish {key!r} within {_WORK}.")

    with session.bounded(_WORK):
        parts = session.until(ready, _WORK, late)
        answer = b"".join(session.store.get(part) for part in parts)
        if session.store.add(f"{key}/read", 1) == readers:  # the last one out deletes the keys
            for old in (*parts, key, f"{key}/read"):
                session.store.delete_key(old)
    if answer[:1] == b"!":
        raise as_error(json.loads(answer[1:]))
    return answer[1:]
