"""Finding and cutting this process's own connections."""

from __future__ import annotations

import os
import selectors
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from processes import launch

from ddpkit.rendezvous.sockets import cut, sockets_beside, sockets_on, sockets_to


@pytest.fixture(params=["127.0.0.1", "::1"])
def connection(request: pytest.FixtureRequest) -> Iterator[tuple[socket.socket, socket.socket, socket.socket]]:
    """A listener, and both ends of a connection to it."""
    family = socket.AF_INET6 if ":" in request.param else socket.AF_INET
    with ExitStack() as stack:
        try:
            listener = stack.enter_context(socket.create_server((request.param, 0), family=family))
        except OSError as error:
            pytest.skip(f"no {request.param} here: {error}")
        ours = stack.enter_context(socket.create_connection(listener.getsockname()[:2]))
        theirs, _ = listener.accept()
        yield listener, ours, stack.enter_context(theirs)


def inode(sock: socket.socket) -> int:
    return os.fstat(sock.fileno()).st_ino


def test_sockets_are_found_by_the_port_that_they_have_or_are_connected_to(
    connection: tuple[socket.socket, socket.socket, socket.socket],
) -> None:
    listener, ours, theirs = connection
    port = listener.getsockname()[1]
    assert sockets_to(port) == {inode(ours)}
    assert sockets_on(port) == {inode(listener), inode(theirs)}


def test_sockets_are_found_by_the_listener_that_is_waited_for_with_them(
    connection: tuple[socket.socket, socket.socket, socket.socket],
) -> None:
    listener, ours, theirs = connection
    family, port = int(listener.family).to_bytes(2, sys.byteorder), listener.getsockname()[1].to_bytes(2, "big")
    host = socket.inet_pton(listener.family, listener.getsockname()[0])
    address = family + port + host if len(host) == 4 else family + port + bytes(4) + host
    with selectors.EpollSelector() as epoll, selectors.EpollSelector() as other:
        epoll.register(listener, selectors.EVENT_READ)
        epoll.register(theirs, selectors.EVENT_READ)
        other.register(ours, selectors.EVENT_READ)
        assert sockets_beside(address + bytes(120)) == {inode(listener), inode(theirs)}
    assert sockets_beside(address + bytes(120)) == set() == sockets_beside(b"")


def test_to_look_at_a_socket_gives_it_no_time_limit(
    connection: tuple[socket.socket, socket.socket, socket.socket],
) -> None:
    _, ours, theirs = connection
    ours.setblocking(True)
    socket.setdefaulttimeout(5)
    try:
        sockets_to(1)
        cut({inode(theirs)})
    finally:
        socket.setdefaulttimeout(None)
    assert os.get_blocking(ours.fileno()) and os.get_blocking(theirs.fileno())


def test_a_connection_that_is_cut_ends_at_both_ends_and_others_go_on(
    connection: tuple[socket.socket, socket.socket, socket.socket],
) -> None:
    listener, ours, theirs = connection
    with socket.create_connection(listener.getsockname()[:2]) as other:
        far, _ = listener.accept()
        with far:
            cut({inode(ours), inode(listener)})
            assert ours.recv(1) == theirs.recv(1) == b""
            other.sendall(b"x")
            assert far.recv(1) == b"x"
    with socket.create_connection(listener.getsockname()[:2]):  # a listener is no connection
        listener.accept()[0].close()


END = """
import ctypes, os, signal, sys
from datetime import timedelta
import torch.distributed as dist
from ddpkit.rendezvous.store import call_with_timeout, connect_to_store

reader, writer = os.pipe()
host = os.fork()
if host == 0:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(writer, b"%d" % server.port)
    signal.pause()
store = connect_to_store("127.0.0.1", int(os.read(reader, 10)), timedelta(seconds=60))
os.kill(host, signal.SIGSTOP)
try:
    call_with_timeout(lambda: store.check(["x"]), 0.2)
except TimeoutError:
    print("abandoned", flush=True)

class Waker:
    def __del__(self, kill=os.kill, host=host, number=signal.SIGCONT):
        kill(host, number)  # the store answers when the interpreter has ended

waker = Waker()
libc = ctypes.CDLL(None)
libc.on_exit(libc.sleep, None)  # of as many seconds as the exit code
sys.exit(3)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs on_exit()")
def test_a_process_ends_well_although_its_store_does_not_answer() -> None:
    (end,) = launch([sys.executable, "-c", END])
    assert end.output.startswith("abandoned\n") and end.code == 3, end
