"""Connect the watches of all ranks into a tree as they join."""

from __future__ import annotations

import json
import socket
import weakref
from collections.abc import Callable
from datetime import timedelta

from ..errors import LaunchError
from ..job import current_job
from ..job.job import Job
from ..job.leaving import fill_error_file
from ..join.members import Members
from ..join.session import Session
from ..parsing import parse
from .links import children_of, connect_to_watch, parent_of, watch_key
from .thread import WatchThread

Listen = Callable[[], tuple[socket.socket, tuple[str, int]]]


def start_watch(job: Job, session: Session, members: Members, listener: socket.socket | None, listen: Listen) -> None:
    """Connect this rank to the ranks below it, then to the one above it.

    Args:
        job: The job; its watch is set once that runs, so that a failed connection can end it.
        session: Its session.
        members: Its ranks.
        listener: The socket where rank 0 already listens; None on others.
        listen: Opens one on a rank with ranks below it.
    """
    rank = session.rank
    timeout = job.asked.timeout
    with session.bounded(timeout):
        if rank > 0 and children_of(rank, members.world_size):
            listener, address = listen()
            session.store.set(watch_key(rank), json.dumps({"address": address}))
        job.watch = watch = WatchThread(session, members.token, listener, fill_error_file)
        watch.wait_for_children(timeout)
        if rank > 0:
            watch.connect(_connect_to_parent(session, members, timeout))
    session.watch = weakref.ref(watch)


def _connect_to_parent(session: Session, members: Members, timeout: timedelta) -> socket.socket:
    parent = parent_of(session.rank)
    address = members.watch_address
    if parent > 0 or address is None:
        address = _watch_address(session, parent, timeout)
    try:
        return connect_to_watch(parent, address, timeout.total_seconds())
    except LaunchError as error:  # the connection may have ended because another rank failed
        raise session.find_cause(host=parent) or error from None


def _watch_address(session: Session, rank: int, timeout: timedelta) -> tuple[str, int]:
    """Wait until a rank other than rank 0 has published where its watch listens."""
    key = watch_key(rank)

    def late() -> LaunchError:
        return LaunchError(f"Rank {rank} ({session.hosts[rank]}) did not open its watch within {timeout}.")

    session.wait_for_key(key, timeout, late)
    found = parse(session.store.get(key), key, {"address": tuple[str, int]})
    address, port = found["address"]
    return address, port


current_job.start_watch = start_watch
