"""Wait for other ranks: through the store, with a time-out, naming the ranks that are missing."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from ..arguments import check_timeout
from ..errors import PeerError, like_original
from ..job import lifecycle
from ..job.job import subset_of
from ..launch import ranks
from .groups import Group, peers_of
from .transfer import broadcast_bytes, pickled

if TYPE_CHECKING:
    from ..rendezvous.session import Ranks, Session

P = ParamSpec("P")
T = TypeVar("T")
_WORK = timedelta(days=1)  # time-out while one rank works and the others wait


def barrier(name: str | None = None, timeout: timedelta | None = None, *, group: Group | None = None) -> None:
    """Wait until every rank has called it. Collective.

    It works on any backend, and does not synchronise the accelerator.

    Args:
        name: Name in error messages; reusable: the ranks' n-th uses of a name meet.
        timeout: Longest wait; by default that of `setup()`.
        group: Ranks that meet; by default all. A torch process group, or one dimension of a mesh, that contains this
            rank.

    Raises:
        BarrierTimeoutError: If ranks are missing after the time-out; on every rank, late ones included. Its `missing`
            and `arrived` list them; the message says where a missing rank waits instead.
        PeerError: If another rank fails, leaves, or passes a bad time-out.
        TypeError: If `timeout` is a number (write `timedelta(seconds=...)`), or `group` is not a group.
        ValueError: If `timeout` is not positive, or this rank is not in the group.

    Example:
        >>> barrier()
    """
    subset = subset_of(peers_of(group))
    session = lifecycle.enter_collective()
    if session is None:
        if timeout is not None:
            check_timeout(timeout)
        return
    key = _key(session, "barrier", name, subset)
    if timeout is not None:
        with _report_failure(session, key, subset):  # the others pass a valid time-out
            check_timeout(timeout)
    session.barrier(key, timeout, ranks=subset)


@contextmanager
def together(name: str | None = None) -> Iterator[None]:
    """Run a block; afterwards either all ranks continue or all raise. Collective.

    A rank that raises in the block re-raises its exception without waiting; the others raise `PeerError` at the end of
    the block. The block may therefore contain no collectives, unless its failure ends the job.

    Args:
        name: Name of the block in error messages.

    Raises:
        PeerError: If the block raised on another rank; it holds that rank, its exception and traceback. An `except` for
            the class of that exception catches it, too.
        BarrierTimeoutError: If ranks do not reach the end in time.

    Example:
        >>> with together("read the index"):
        ...     index = list(range(3))
    """
    session = lifecycle.enter_collective()
    if session is None:
        yield
        return
    key = _key(session, "together", name)
    with _report_failure(session, key):
        yield
    _meet(session, key)


@contextmanager
def main_process_first(local: bool = False) -> Iterator[None]:
    """Run a block on rank 0 first, then on the other ranks, for example to download data. Collective.

    The block may not contain collectives. The others wait on the store for up to a day, so slow work causes no
    collective to time out. If the first rank raises, the others raise at once; if it dies, the watch
    (`setup(watch=True)`) ends the wait.

    Args:
        local: Let the first rank of every node go first, for node-local disks.

    Raises:
        PeerError: On the other ranks, if the block raised on a first rank; as in `together`.
        BarrierTimeoutError: If the first ranks are done and others do not arrive in time.

    Example:
        >>> with main_process_first():
        ...     data = "read from the cache, or downloaded into it"
    """
    session = lifecycle.enter_collective()
    if session is None:
        yield
        return
    key = session.count("main_process_first")
    first = 0
    if local:
        first = session.nodes.index(session.nodes[session.rank])
    if session.rank != first:
        _meet(session, key, _WORK)
        yield
        return
    with _report_failure(session, key):
        yield
    session.barrier(key)


def run_on_main(fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run `fn` on rank 0 and return its value on every rank. Collective.

    `fn` may not contain collectives. The others wait on the store for up to a day, so slow work causes no collective to
    time out. If rank 0 raises, the others raise at once; if it dies, the watch (`setup(watch=True)`) ends the wait.
    Once all ranks have arrived, rank 0 broadcasts the value.

    Args:
        fn: Function called on rank 0 only.
        *args: Its arguments.
        **kwargs: Its keyword arguments.

    Returns:
        The value of `fn`; on the other ranks a pickled copy.

    Raises:
        PeerError: On the other ranks, if `fn` raised on rank 0, which raises the exception itself. An `except` for its
            class catches both.
        BarrierTimeoutError: If rank 0 is done and other ranks do not arrive in time.

    Example:
        >>> run_on_main(sorted, [2, 1])
        [1, 2]
    """
    session = lifecycle.enter_collective()
    if session is None:
        return fn(*args, **kwargs)
    key = session.count("run_on_main")
    call = "run_on_main()"
    if session.rank != 0:
        _meet(session, key, _WORK)
        return pickle.loads(broadcast_bytes(call, b"", 0))  # type: ignore[no-any-return]
    with _report_failure(session, key):
        value = fn(*args, **kwargs)
        data = pickled(call, value)
    session.barrier(key)  # on the store, so that no rank is late for the process group
    broadcast_bytes(call, data, 0)
    return value


def main_process_only(fn: Callable[P, T]) -> Callable[P, T | None]:
    """Decorate a function to run on rank 0 only; on other ranks it returns None, without waiting.

    Example:
        >>> main_process_only(print)("once")
        once
    """

    @functools.wraps(fn)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T | None:
        if not ranks.is_main_process():
            return None
        return fn(*args, **kwargs)

    return wrapped


def stop_together(flag: bool) -> bool:
    """Return on every rank whether any rank wants to stop. Collective.

    It costs about as much as a barrier.

    Args:
        flag: True if this rank wants to stop, for example because it is out of data or time.

    Raises:
        TypeError: If `flag` has no truth value, such as a tensor of two elements; on the other ranks `PeerError`.

    Example:
        >>> stop_together(False)
        False
    """
    session = lifecycle.enter_collective()
    if session is None:
        return _as_bool(flag)
    key = session.count("stop_together")
    with _report_failure(session, key):
        wants = _as_bool(flag)
    counter = f"{key}/flags"
    used = [counter] if session.rank == 0 else []  # deleted later, by one rank
    with session.bounded(session.timeout):
        if wants:
            session.store.add(counter, 1)
        session.barrier(key, used=used)
        return session.store.add(counter, 0) > 0


def _as_bool(flag: object) -> bool:
    try:
        return bool(flag)
    except Exception as error:
        raise TypeError(f"flag must be True or False, got {flag!r}: {error}") from error


def _key(session: Session, call: str, name: str | None, subset: Ranks | None = None) -> str:
    """Make the key of this use of a name; the quotes separate names from all other keys."""
    if name is not None:
        call = f"{call} {str(name)!r}"
    return session.count(call, subset)


def _meet(session: Session, key: str, timeout: timedelta | None = None) -> None:
    """Wait for all ranks; raise for a peer's exception one that `except` catches on all ranks alike.

    Otherwise they would go separate ways.
    """
    try:
        session.barrier(key, timeout)
    except PeerError as error:
        raise like_original(error) from None


@contextmanager
def _report_failure(session: Session, key: str, subset: Ranks | None = None) -> Iterator[None]:
    """If the block raises on this rank, make the ranks that meet under the key raise, too."""
    try:
        yield
    except BaseException as error:
        session.barrier(key, error=error, ranks=subset)
        raise
