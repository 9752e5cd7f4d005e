"""Connections to other hosts, and gloo's, which are cut after the job has failed.

A gloo collective waits for its peers and cannot be cancelled; destroying the group waits for it, and a DDP model keeps
the group until the process ends. Cutting a connection ends the collective at both ends. Data being written may then be
lost, and waited for forever; so the ranks' current calls first get time to end by themselves.
"""

from __future__ import annotations

import ctypes
import functools
import ipaddress
import os
import re
import socket
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

Listener = tuple[socket.socket, tuple[str, int]]  # and its address
LOOPBACKS = ("lo", "lo0")  # names of the loopback interface
FLUSH_SECONDS = 0.5  # seconds for collectives that can still end
_PROBE = 2.0  # seconds in which a reachable host accepts or refuses a connection


def listen(address: str, one_node: bool) -> Listener:
    """Open the listener for the watches of other ranks; return it and its address.

    On one node it listens on the loopback interface, which nobody else reaches. On several it listens on the interface
    of `address` alone, or on all if that is a name, because the interface is then unknown.
    """
    for interface in ("127.0.0.1", "::1") if one_node else (address,):
        with suppress(OSError):
            numeric = socket.getaddrinfo(encoded(interface), 0, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
            family, _, _, _, place = numeric[0]
            listener = socket.create_server(place, family=family, backlog=1024)
            host, port = listener.getsockname()[:2]
            return listener, (host, port)
    try:
        listener = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    except (OSError, ValueError):  # a machine without IPv6, or without sockets for both
        listener = socket.create_server(("", 0), backlog=1024)
    return listener, (address, listener.getsockname()[1])


def connect(address: str, port: int, timeout: float) -> socket.socket:
    """Connect to a host, by its name or address."""
    return socket.create_connection((encoded(address), port), timeout)


def probe(address: str, port: int) -> bool | None:
    """Return whether a program listens there; None if the host cannot be reached."""
    try:
        connect(address, port, _PROBE).close()
    except ConnectionRefusedError:
        return False
    except OSError:
        return None
    return True


def encoded(address: str) -> Any:
    """Encode a host's name for the resolver: with a `str` Python imports a codec, which takes milliseconds."""
    return address.encode() if address.isascii() else address


def is_loopback(address: str | None) -> bool:
    """Return whether an address, as the user wrote it, reaches this machine alone."""
    with suppress(ValueError):
        return address == "localhost" or ipaddress.ip_address(address or "").is_loopback
    return False


def sockets_to(port: int) -> set[int]:
    """Return this process's sockets connected to a port, on any host, as inode numbers."""
    return {number for descriptor, number in _open_sockets() if _port(_libc().getpeername, descriptor) == port}


def sockets_on(port: int) -> set[int]:
    """Return this process's sockets bound to this port: a listener and its accepted connections."""
    return {number for descriptor, number in _open_sockets() if _port(_libc().getsockname, descriptor) == port}


def sockets_beside(listener: bytes) -> set[int]:
    """Return the sockets that this process polls together with a listener, in one epoll instance.

    gloo has an instance per group, and a script's threads have others. Linux lists the sockets of each.

    Args:
        listener: Its address in the kernel's form, with anything after it.
    """
    numbers = dict(_open_sockets())
    others: set[int] = set()
    with suppress(OSError):
        others = set(map(int, os.listdir("/proc/self/fd"))) - numbers.keys()
    for descriptor in others:
        polled: list[str] = []
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{descriptor}") == "anon_inode:[eventpoll]":
                text = Path(f"/proc/self/fdinfo/{descriptor}").read_text()
                polled = re.findall(r"^tfd: *(\d+)", text, re.MULTILINE)
        found = numbers.keys() & map(int, polled)
        addresses = (_address(_libc().getsockname, other) for other in sorted(found))  # gloo listens first
        if any(address and listener.startswith(address) for address in addresses):
            return {numbers[other] for other in found}
    return set()


def cut(some: set[int], after: float = 0.0) -> None:
    """Cut these sockets' connections, after this many seconds; their users will notice."""
    if not some:
        return
    time.sleep(after)
    for descriptor, number in _open_sockets():
        if number in some:
            with suppress(OSError):
                _cut_one(os.dup(descriptor), some)


def _cut_one(descriptor: int, some: set[int]) -> None:
    """Cut the connection of a descriptor, if it is still one of these sockets, and close the descriptor."""
    try:
        is_connected = _port(_libc().getpeername, descriptor) > 0  # cutting a listener aborts gloo
        if is_connected and os.fstat(descriptor).st_ino in some:
            _libc().shutdown(descriptor, socket.SHUT_RDWR)
    finally:
        os.close(descriptor)


def _port(ask: Any, descriptor: int) -> int:
    """Return the port in an internet socket's address, or in that of its peer; 0 if there is none."""
    address = _address(ask, descriptor)
    if int.from_bytes(address[:2], sys.byteorder) not in (socket.AF_INET, socket.AF_INET6):
        return 0
    return int.from_bytes(address[2:4], "big")


def _address(ask: Any, descriptor: int) -> bytes:
    """Ask the kernel for a socket's address; b"" if it has none.

    Not through a Python socket object, which may get a time-out from `socket.setdefaulttimeout()`.
    """
    address, length = ctypes.create_string_buffer(128), ctypes.c_uint32(128)
    failed = ask(descriptor, address, ctypes.byref(length))
    return b"" if failed else address.raw[: length.value]


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def close(some: set[int]) -> None:
    """Close this process's ends of these sockets, whoever uses them here."""
    for descriptor, number in list(_open_sockets()):
        if number in some:
            with suppress(OSError):
                os.close(descriptor)


def _open_sockets() -> Iterator[tuple[int, int]]:
    """Yield descriptor and inode number of each open socket."""
    with suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            descriptor = int(name)
            with suppress(OSError):
                state = os.fstat(descriptor)
                if stat.S_ISSOCK(state.st_mode):
                    yield descriptor, state.st_ino
