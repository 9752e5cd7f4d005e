"""Everything that waits for other ranks: always on the store, always with a bound, always saying for whom."""

from __future__ import annotations

import functools
import io
import json
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import ParamSpec, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from ..arguments import check_timeout
from ..errors import DdpkitError
from ..launch import ranks
from ..process_group import lifecycle
from ..process_group.failures import FAILURE, as_error, failure_record
from ..process_group.session import Session
from ..process_group.store_values import add, parse
from .pickling import UnshardedPickler, check_copies

P = ParamSpec("P")
T = TypeVar("T")
_NAME = 1000  # characters: names are keys of the store
_WORK = timedelta(days=1)  # bound on work that one rank does while the others wait; a rank that dies is noticed at once


def barrier(name: str | None = None, timeout: timedelta | None = None) -> None:
    """Waits until every rank is here. Collective, on any backend; it leaves the accelerator's queue alone.

    Args:
        name: What to call it in errors, 1 to 1000 characters; it may be used again. Ranks meet at the same use of the
            same name.
        timeout: Bound on the wait; by default that of `setup()`.

    Raises:
        BarrierTimeoutError: If ranks are missing when the time is up; `.missing` and `.arrived` say which, on every
            rank, also on those that come later. The message says where a missing rank waits instead.
        PeerError: If a rank failed or left meanwhile, or passed a bad argument.
        TypeError: If `timeout` is a number: write `timedelta(seconds=...)`; if `name` is no string.
        ValueError: If `timeout` is not positive, or `name` empty or too long.

    Example:
        >>> barrier()
    """
    if not lifecycle.joined():
        _check_name(name)
        _check_bound(timeout)
        return
    session = lifecycle.current_session()
    key, refusal = _keys(session, "barrier", name)
    try:
        _check_bound(timeout)
    except (TypeError, ValueError) as error:  # the others come with a good one
        session.meet(key, failure=failure_record(session.rank, error))
        raise
    session.meet(key, timeout, refusal=refusal)


def _check_bound(timeout: timedelta | None) -> None:
    if timeout is not None:
        check_timeout(timeout)


def _check_name(name: object) -> None:
    if name is None:
        return
    if not isinstance(name, str):
        raise TypeError(f"name must be a string, equal on every rank, got {name!r}.")
    if not 0 < len(name) <= _NAME:
        raise ValueError(f"name must have 1 to {_NAME} characters, got {len(name)}.")


def _keys(session: Session, call: str, name: str | None) -> tuple[str, str]:
    """Make the key of this use of a name, and that of this use of the call, where a rank with a bad name leaves word.

    The quotes keep any name apart from all other keys.
    """
    refusal = session.count(f"{call} with a bad name")
    try:
        _check_name(name)
    except (TypeError, ValueError) as error:
        with session.bounded(session.timeout):
            session.store.set(refusal, json.dumps(failure_record(session.rank, error)))
        raise
    return session.count(call if name is None else f"{call} {str(name)!r}"), refusal


def exchange(text: str) -> list[str]:
    """Every rank's text, by rank, through the store; `[text]` on one process. Collective."""
    return lifecycle.current_session().exchange(text) if lifecycle.joined() else [text]


@contextmanager
def together(name: str | None = None) -> Iterator[None]:
    """A block after which either all ranks go on or all raise. Collective.

    A rank that raises in the block keeps its exception and does not wait; the others raise when they come to the end.
    So the block may hold no collective of its own, unless its failure ends the job.

    Args:
        name: What to call it in errors.

    Raises:
        PeerError: If the block raised on another rank; it holds that rank, its exception and traceback.
        BarrierTimeoutError: If ranks do not come to the end in time.

    Example:
        >>> with together("read the index"):
        ...     index = list(range(3))
    """
    if not lifecycle.joined():
        _check_name(name)
        yield
        return
    session = lifecycle.current_session()
    key, refusal = _keys(session, "together", name)
    try:
        yield
    except BaseException as error:
        session.meet(key, failure=failure_record(session.rank, error))
        raise
    session.meet(key, refusal=refusal)


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
    if not lifecycle.joined():
        yield
        return
    session = lifecycle.current_session()
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
        _tell(session, key, error)
        raise
    _tell(session, key)


def run_on_main(fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run `fn` on rank 0 and give its value to every rank. Collective; `fn` itself may hold no collective.

    The others wait on the store, so slow work trips no time-out of a collective. When all ranks are there the value
    goes through the process group.

    Args:
        fn: Called with the arguments on rank 0 only.
        *args: Its arguments.
        **kwargs: Its keyword arguments.

    Returns:
        What it returned, as a pickled copy on the other ranks.

    Raises:
        PeerError: On the other ranks, if it raised on rank 0; rank 0 keeps the exception.
        BarrierTimeoutError: If rank 0 has its value and ranks do not come in time.

    Example:
        >>> run_on_main(sorted, [2, 1])
        [1, 2]
    """
    if not lifecycle.joined():
        return fn(*args, **kwargs)
    session = lifecycle.current_session()
    key = session.count("run_on_main")
    if session.rank != 0:
        session.meet(key, _WORK)
        copy: T = pickle.loads(_from_main(b""))
        return copy
    try:
        value = fn(*args, **kwargs)
        UnshardedPickler(data := io.BytesIO(), "run_on_main()").dump(value)
        check_copies("run_on_main()", data.getvalue(), pickle.loads)
    except BaseException as error:
        session.meet(key, failure=failure_record(session.rank, error))
        raise
    session.meet(key)  # in the store, so that nobody is late for the group
    _from_main(data.getvalue())
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

    Raises:
        TypeError: If `flag` is neither true nor false, as a tensor of two elements; on the other ranks `PeerError`.

    Example:
        >>> stop_together(False)
        False
    """
    if not lifecycle.joined():
        return _as_bool(flag)
    session = lifecycle.current_session()
    key = session.count("stop_together")
    try:
        wants = _as_bool(flag)
    except TypeError as error:
        session.meet(key, failure=failure_record(session.rank, error))
        raise
    with session.bounded(session.timeout):
        if wants:
            add(session.store, f"{key}/flags", 1)
        session.meet(key, used=[f"{key}/flags"] if session.rank == 0 else [])
        return add(session.store, f"{key}/flags", 0) > 0


def _as_bool(flag: object) -> bool:
    try:
        return bool(flag)
    except Exception as error:
        raise TypeError(f"flag must be True or False, got {flag!r}: {error}") from error


def _from_main(data: bytes) -> bytes:
    """Give rank 0's bytes to every rank through the group, where only ranks can write; it must not be empty."""
    device = lifecycle.control_device()
    with lifecycle.peer_errors():
        size = torch.tensor([len(data)], device=device)
        dist.broadcast(size, 0)
        block = torch.zeros(int(size), dtype=torch.uint8, device=device)
        if data:
            block.copy_(torch.from_numpy(np.frombuffer(data, np.uint8).copy()))
        dist.broadcast(block, 0)
    return block.cpu().numpy().tobytes()


def _tell(session: Session, key: str, error: BaseException | None = None) -> None:
    """Publish what became of work that the others wait for."""
    failure = failure_record(session.rank, error) if error else {}
    with session.bounded(session.timeout):
        session.store.set(key, json.dumps(failure))
        session.store.check([key])  # set() does not wait: the news of our leaving must not overtake it


def _outcome(session: Session, key: str, worker: int, readers: int) -> None:
    """Wait for what another rank publishes; raise its failure."""

    def ready() -> bool | None:
        left = worker in session.failures.left  # before the look, because it tells before it leaves
        if session.store.check([key]):
            return True
        if left:
            session.failures.raise_if_any()  # it may have left because another failed
            raise session.failures.departure(worker)
        return None

    def late() -> bool:
        raise DdpkitError(f"Rank {worker} ({session.hosts[worker]}) did not finish {key!r} within {_WORK}.")

    with session.bounded(_WORK):
        session.until(ready, _WORK, late)
        answer = session.store.get(key)
        if add(session.store, f"{key}/read", 1) == readers:  # the last one out deletes the keys
            session.store.delete_key(key)
            session.store.delete_key(f"{key}/read")
    if failure := parse(answer, key, {}, FAILURE):
        raise as_error(failure)
