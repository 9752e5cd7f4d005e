"""Wait for other ranks: always on the store, always with a bound, always saying for whom."""

from __future__ import annotations

import functools
import io
import json
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from ..arguments import check_timeout
from ..errors import DdpkitError
from ..launch import ranks
from ..process_group import lifecycle
from ..process_group.failures import FAILURE, as_error, failure_record
from ..process_group.session import Session
from ..process_group.store_values import add, parse
from ..torch_internals import untraced
from .pickling import UnshardedPickler, check_copies
from .tensors import bytes_as_tensor

P = ParamSpec("P")
T = TypeVar("T")
_LONGEST_NAME = 1000  # characters: names are keys of the store
_WORK = timedelta(days=1)  # bound on work that one rank does while the others wait; a rank that dies is noticed at once


def barrier(name: str | None = None, timeout: timedelta | None = None) -> None:
    """Wait until every rank is here. Collective, on any backend; it leaves the accelerator's queue alone.

    Args:
        name: Its name in errors, 1 to 1000 characters; it may be used again. Ranks meet at the same use of the
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
        if timeout is not None:
            check_timeout(timeout)
        return
    session = lifecycle.current_session()
    key, refusal_key = _keys(session, "barrier", name)
    if timeout is not None:
        with _report_failure(session, key):  # the others come with a good one
            check_timeout(timeout)
    session.meet(key, timeout, refusal=refusal_key)


@contextmanager
def together(name: str | None = None) -> Iterator[None]:
    """Run a block after which either all ranks go on or all raise. Collective.

    A rank that raises in the block keeps its exception and does not wait; the others raise when they come to the end.
    So the block may hold no collective of its own, unless its failure ends the job.

    Args:
        name: The block's name in errors.

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
    key, refusal_key = _keys(session, "together", name)
    with _report_failure(session, key):
        yield
    session.meet(key, refusal=refusal_key)


@contextmanager
def main_process_first(local: bool = False) -> Iterator[None]:
    """Run a block on rank 0 first, and on the others when it is done: to prepare what the others then find.

    Collective; but the block itself may hold no collective. The others wait on the store, so slow work trips no
    time-out of a collective. If the first rank raises, all raise.

    Args:
        local: Let the first rank of every node go first, for work on node-local disks.

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
    first = 0
    waiting = len(session.hosts) - 1
    if local:
        node = session.nodes[session.rank]
        first = session.nodes.index(node)
        waiting = session.nodes.count(node) - 1
    key = f"{session.count('main_process_first')} on {first}"
    if session.rank != first:
        _await_outcome(session, key, first, waiting)
        yield
        return
    try:
        yield
    except BaseException as error:
        _publish_outcome(session, key, failure_record(session.rank, error))
        raise
    _publish_outcome(session, key, {})


def run_on_main(fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run `fn` on rank 0 and give its value to every rank. Collective; `fn` itself may hold no collective.

    The others wait on the store, so slow work trips no time-out of a collective. When all ranks are there the value
    goes through the process group.

    Args:
        fn: Called with the arguments on rank 0 only.
        *args: Its arguments.
        **kwargs: Its keyword arguments.

    Returns:
        The value of `fn`, on the other ranks a pickled copy.

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
        copy: T = pickle.loads(_broadcast_from_main(b""))
        return copy
    with _report_failure(session, key):
        value = fn(*args, **kwargs)
        file = io.BytesIO()
        UnshardedPickler(file, "run_on_main()").dump(value)
        data = file.getvalue()
        check_copies("run_on_main()", data, pickle.loads)
    session.meet(key)  # in the store, so that nobody is late for the group
    _broadcast_from_main(data)
    return value


def main_process_only(fn: Callable[P, T]) -> Callable[P, T | None]:
    """Decorate a function to run on rank 0 only: it returns None elsewhere, and nobody waits.

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
    """Ask if any rank wants to stop; every rank gets the same answer. Collective, about as cheap as a barrier.

    Args:
        flag: True if this rank wants to stop, for example because its data or its time has run out.

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
    with _report_failure(session, key):
        wants = _as_bool(flag)
    counter = f"{key}/flags"
    used = [counter] if session.rank == 0 else []  # and deleted later, by one rank
    with session.bounded(session.timeout):
        if wants:
            add(session.store, counter, 1)
        session.meet(key, used=used)
        return add(session.store, counter, 0) > 0


def exchange(text: str) -> list[str]:
    """Give every rank the texts of all ranks, by rank, through the store; `[text]` on one process. Collective."""
    if not lifecycle.joined():
        return [text]
    return lifecycle.current_session().exchange(text)


def _check_name(name: object) -> None:
    if name is None:
        return
    if not isinstance(name, str):
        raise TypeError(f"name must be a string, equal on every rank, got {name!r}.")
    if not 0 < len(name) <= _LONGEST_NAME:
        raise ValueError(f"name must have 1 to {_LONGEST_NAME} characters, got {len(name)}.")


def _as_bool(flag: object) -> bool:
    try:
        return bool(flag)
    except Exception as error:
        raise TypeError(f"flag must be True or False, got {flag!r}: {error}") from error


def _keys(session: Session, call: str, name: str | None) -> tuple[str, str]:
    """Make the key of this use of a name, and that of this use of the call, where a rank with a bad name leaves word.

    The quotes keep any name apart from all other keys.
    """
    refusal_key = session.count(f"{call} with a bad name")
    try:
        _check_name(name)
    except (TypeError, ValueError) as error:
        with session.bounded(session.timeout):
            session.store.set(refusal_key, json.dumps(failure_record(session.rank, error)))
        raise
    if name is not None:
        call = f"{call} {str(name)!r}"
    return session.count(call), refusal_key


class _report_failure:
    """Make the ranks that meet under a key raise, too, if the block raises on this rank."""

    def __init__(self, session: Session, key: str) -> None:
        self.session = session
        self.key = key

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            self.session.meet(self.key, failure=failure_record(self.session.rank, error))


@untraced
def _broadcast_from_main(data: bytes) -> bytes:
    """Give rank 0's bytes to every rank through the group, where only ranks can write; it must not be empty."""
    device = lifecycle.control_device()
    with lifecycle.peer_errors():
        size = torch.tensor([len(data)], device=device)
        dist.broadcast(size, 0)
        block = torch.zeros(int(size), dtype=torch.uint8, device=device)
        if data:
            block.copy_(bytes_as_tensor(data))
        dist.broadcast(block, 0)
    return block.cpu().numpy().tobytes()


def _publish_outcome(session: Session, key: str, failure: dict[str, Any]) -> None:
    """Publish the outcome of work that the others wait for: its failure, {} if there is none."""
    with session.bounded(session.timeout):
        session.store.set(key, json.dumps(failure))
        session.store.check([key])  # set() does not wait: the news of our leaving must not overtake it


def _await_outcome(session: Session, key: str, worker: int, readers: int) -> None:
    """Wait for the outcome of another rank's work, which so many ranks read; raise its failure."""

    def ready() -> bool | None:
        left = worker in session.failures.left  # before the look, because it publishes before it leaves
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
        read = add(session.store, f"{key}/read", 1)
        if read == readers:  # nobody needs the keys any more
            session.store.delete_key(key)
            session.store.delete_key(f"{key}/read")
    failure = parse(answer, key, {}, FAILURE)
    if failure:
        raise as_error(failure)
