"""Connections of the watch: the tree of ranks, and keep-alive."""

from __future__ import annotations

import ctypes
import errno
import signal
import socket
import sys
from collections.abc import Iterable
from contextlib import suppress

from ..errors import LaunchError
from ..join.sockets import connect

_SEGMENTS = slice(140, 144)  # where Linux's struct tcp_info has tcpi_segs_in

# The tree along which ranks report failures: rank 0 at the top, at most 64 connections per rank.

CHILDREN = 63  # most children of a rank


def parent_of(rank: int) -> int:
    """Return the rank above this one, which is not rank 0."""
    return (rank - 1) // CHILDREN


def children_of(rank: int, world_size: int) -> range:
    """Return the ranks below this one that connect to it.

    >>> children_of(0, world_size=65), children_of(1, world_size=65), children_of(2, world_size=65)
    (range(1, 64), range(64, 65), range(65, 65))
    """
    first = rank * CHILDREN + 1
    return range(min(first, world_size), min(first + CHILDREN, world_size))


def is_below(rank: int, top: int) -> bool:
    """Return whether a rank's path to rank 0 leads through another, or is that rank."""
    while rank > top:
        rank = parent_of(rank)
    return rank == top


def watch_key(rank: int) -> str:
    """Return the key for the address of a rank's watch, other than rank 0's."""
    return f"watch/{rank}"


# Single connections.


def connect_to_watch(rank: int, address: tuple[str, int], timeout: float) -> socket.socket:
    """Connect to the watch of a rank; raise `LaunchError` if it cannot be reached."""
    host, port = address
    try:
        return connect(host, port, timeout)
    except OSError as error:
        raise LaunchError(
            f"The watch cannot connect to rank {rank} at {host}:{port}: {error}. Open the ports between the nodes, "
            "which the process group needs, too, or turn off the watch: setup(watch=False)."
        ) from error


def keep_alive(connection: socket.socket) -> None:
    """Make the kernel probe the other end every second, which `segments_received()` then shows.

    The kernel itself gives up only after an hour; where it does not count segments, after 9 s.
    """
    options = {"TCP_KEEPIDLE": 3, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 9000}
    if segments_received(connection):
        options = {"TCP_KEEPIDLE": 1, "TCP_KEEPINTVL": 1, "TCP_USER_TIMEOUT": 3_600_000}
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in options.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def segments_received(connection: socket.socket) -> int:
    """Return the number of TCP segments received, empty ones included; 0 where the kernel does not count them."""
    if sys.platform != "linux":
        return 0
    with suppress(OSError):  # some sandboxes lack this option
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SEGMENTS.stop)
        return int.from_bytes(info[_SEGMENTS], sys.byteorder)
    return 0


class Attempts:
    """New connections to the other end of a connection, as probes: its host answers, if only by a refusal."""

    def __init__(self) -> None:
        self._sockets: list[socket.socket] = []

    def begin(self, connection: socket.socket) -> None:
        """Start another; of the earlier ones only the last continues."""
        self.close(but=1)
        with suppress(OSError):
            attempt = socket.socket(connection.family)
            self._sockets.append(attempt)
            attempt.setblocking(False)
            attempt.connect_ex(connection.getpeername())

    def are_answered(self) -> bool:
        """Return whether the host answered one."""
        return any(map(_is_answered, self._sockets))

    def close(self, but: int = 0) -> None:
        """Abandon all but the last ones."""
        while len(self._sockets) > but:
            self._sockets.pop(0).close()


def _is_answered(attempt: socket.socket) -> bool:
    if attempt.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == errno.ECONNREFUSED:
        return True
    with suppress(OSError):
        attempt.getpeername()
        return True
    return False


def send_exit_code(descriptors: Iterable[int]) -> None:
    """Make the exit of this process write its exit code, as one byte, to each of these connections.

    Python's exit hooks do not get the exit code, because the `SystemExit` is gone by then; glibc's `on_exit` does.
    Elsewhere nothing is written. The connections stay open until the process has ended.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "on_exit") or signal.getsignal(signal.SIGPIPE) != signal.SIG_IGN:
        return  # where a broken pipe kills, writing might change how the process ends
    libc.fdopen.restype = ctypes.c_void_p
    for descriptor in descriptors:
        stream = libc.fdopen(descriptor, b"w")
        if stream:  # void on_exit(void (*f)(int exit_code, void *stream), void *stream), and f is fputc
            libc.on_exit(libc.fputc, ctypes.c_void_p(stream))
