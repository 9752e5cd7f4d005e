"""The files that a rank holds open for its connections to the others, and the limit on them."""

from __future__ import annotations

import os
import resource

from ..errors import LaunchError
from ..launch.launch import Launch
from .monitor_tree import children_of
from .options import Options
from .tcp_store import store_outlives_ranks

_OTHERS = 24  # files that joining opens beside one for each connection
_ROOM = 1024  # files that the limit to set leaves for data loaders and logs


def check_open_files(launch: Launch, asked: Options) -> None:
    """Raise if this rank may not open as many files as it has connections to the others."""
    if launch.world_size == 1:
        return
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _connections(launch, asked) + _OTHERS + _open_now()
    if limit == resource.RLIM_INFINITY or needed <= limit:
        return
    raise LaunchError(
        f"Rank {launch.rank} of {launch.world_size} needs about {needed} open files, most of them connections to the "
        f"other ranks, but the limit is {limit}. Raise it in front of the launcher: ulimit -n {needed + _ROOM}"
    )


def _connections(launch: Launch, asked: Options) -> int:
    others = launch.world_size - 1
    count = 0
    if asked.backend is None or "gloo" in asked.backend:  # which connects each rank to all others
        count += others
    if asked.watch:
        count += len(children_of(launch.rank, launch.world_size))
    if launch.rank == 0 and asked.origin.store is None and not store_outlives_ranks(launch):
        count += others
    return count


def _open_now() -> int:
    try:
        return len(os.listdir("/dev/fd"))
    except OSError:  # where the system does not tell
        return 0
