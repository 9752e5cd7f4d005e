"""Connections: those of the watch, which are kept alive, and those of gloo's group, cut when the job has failed.

A collective of gloo's waits for its peers and cannot be called off; destroying the group waits for it, and a DDP model
keeps the group until the process has ended. A connection that is cut ends the collective, at both ends. What is just
being written may be lost then, and waited for without end; so what the ranks are in gets time to end by itself first.
"""

from __future__ import annotations

import os
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import suppress

from .errors import LaunchError

SETTLE = 0.5  # seconds in which collectives that can still end do


def listen() -> socket.socket:
    """Opens rank 0's door, to which the watches of all other ranks connect."""
    if socket.has_dualstack_ipv6():
        with suppress(OSError):
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    return socket.create_server(("", 0), backlog=1024)


def dial(address: str, port: int, timeout: float) -> socket.socket:
    """Connects to that door; raises `LaunchError` if it cannot be reached."""
    try:
        return socket.create_connection((address, port), timeout=timeout)
    except OSError as error:
        raise LaunchError(
            f"The watch cannot connect to rank 0 at {address}:{port}: {error}. Open the ports between the nodes, which "
            "the group needs as well, or do without the watch: setup(watch=False)."
        ) from error


def keep_alive(wire: socket.socket) -> None:
    """Lets the kernel find a dead link: it asks after 3 s of silence, 3 times, 2 s apart."""
    wire.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 3), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            wire.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def sockets() -> set[int]:
    """The sockets of this process, as inode numbers; none where the system does not tell."""
    return {number for _, number in _open_sockets()}


def cut(some: set[int], after: float = 0.0) -> None:
    """Ends the connections among these sockets, so many seconds later; whoever uses them will find that out."""
    time.sleep(after if some else 0.0)
    for descriptor, number in _open_sockets() if some else ():
        if number in some:
            with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as ours:
                ours.getpeername()  # raises for a listener, which gloo would abort the process over
                if os.fstat(ours.fileno()).st_ino in some:  # it may have been closed meanwhile
                    ours.shutdown(socket.SHUT_RDWR)


def _open_sockets() -> Iterator[tuple[int, int]]:
    with suppress(OSError):
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            with suppress(OSError):
                if stat.S_ISSOCK((state := os.fstat(descriptor)).st_mode):
                    yield descriptor, state.st_ino
