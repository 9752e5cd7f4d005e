"""The connections of the watch: a tree with rank 0 at the top, open to the job's ranks only.

Nothing here blocks, so that no peer, slow, stopped or hostile, delays messages from the others. A stranger (a
connection without the token in its first line) has little time and memory, and nothing that it sends is interpreted.
"""

from __future__ import annotations

import ctypes
import errno
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from ..parsing import encode
from .messages import Lines, Message, children_of, parent_of, parse, shows_token

_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE
_MAX_STRANGERS = 64  # open connections, beyond those of the ranks, that have not sent the token
_TOKEN_SECONDS = 30.0  # time limit for the token
_TOKEN_BYTES = 200_000  # bytes that may come before it
_MAX_ACCEPTED = 100  # connections accepted between two checks, beyond those of the ranks
_LOOK = 1.0  # seconds between checks whether anything has come from each rank
_DOUBTFUL = 2  # checks in a row without data, after which the rank's host is probed in a second way
_SILENT = 9  # checks in a row without data, after which the connection counts as closed
_OUT_OF_RESOURCES = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


@dataclass(frozen=True)
class Event:
    """A rank's message, or the end of its connection; `rank` is None for a message with the token from no rank."""

    rank: int | None
    message: Message | None  # None when the connection has ended
    silent: bool = False  # whether it ended for lack of data


@dataclass(eq=False)
class _Connection:
    socket: socket.socket
    rank: int | None = None
    since: float = field(default_factory=lambda: time.monotonic())  # read when called: tests replace the clock
    lines: Lines = field(default_factory=Lines)
    unsent: bytearray = field(default_factory=bytearray)
    open: bool = True
    asks: bool = False  # whether it sent the token to ask what the ranks are doing
    exiting: bool = False  # whether its process is exiting, with the exit code still to come
    segments: int = 0  # received until the last check
    silent: int = 0  # checks in a row without data
    probes: Probes = field(default_factory=lambda: Probes())  # looked up when called: tests replace it


class Connections:
    """This rank's connections in the tree, to its children and its parent.

    One thread polls; any thread may post.

    Args:
        rank: This process's rank.
        world_size: Number of ranks in the job.
        token: Secret of this start of the job.
        listener: Socket for the children, if this rank has some. It is closed with the connections.
        say: Called with a text for the log.
    """

    def __init__(
        self, rank: int, world_size: int, token: str, listener: socket.socket | None, say: Callable[[str], None]
    ) -> None:
        self._rank = rank
        self._world_size = world_size
        self._children = children_of(rank, world_size)
        self._token = token
        self._say = say
        self._ranks: dict[int, _Connection] = {}
        self._strangers: dict[_Connection, None] = {}  # the oldest first
        self._backlogged: set[_Connection] = set()  # with unsent data
        self._lock = threading.Lock()  # guards sending
        self._listener = listener
        self._listens = False
        self._accepted = 0  # connections since the last check
        self._has_warned = False  # whether it has logged that none can be accepted
        self._next_look = 0.0
        self._leaving = False
        self._announcement = b""  # sent to those that connect later
        self.is_full = not self._children  # whether all children have connected
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._woken.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._woken, _READ)
        if listener is not None:
            listener.setblocking(False)

    def connect(self, sock: socket.socket) -> None:
        """Use this socket as the connection to the parent."""
        sock.setblocking(False)
        connection = _Connection(sock)
        # before any other post
        connection.unsent += encode(token=self._token, rank=self._rank) + self._announcement
        self._adopt(connection, parent_of(self._rank))
        self._selector.register(sock, _READ, connection)  # last: the other thread may be polling
        self._send(connection, b"")
        self.wake()

    def absent(self) -> list[int]:
        """Return the children that are not connected."""
        return [rank for rank in self._children if rank not in self._ranks]

    def post(self, line: bytes, exclude: int | None = None, to: Collection[int] | None = None) -> None:
        """Send a line to connected ranks: what the kernel takes at once, the rest later.

        Args:
            line: The line.
            exclude: Rank to skip.
            to: The ranks; by default all.
        """
        for rank, connection in list(self._ranks.items()):
            if rank != exclude and (to is None or rank in to):
                self._send(connection, line)
        if self._backlogged:
            self.wake()

    def announce(self, line: bytes, exclude: int | None = None) -> None:
        """Send a line to all connected ranks, and to those that connect later."""
        self._announcement = line
        self.post(line, exclude)

    def post_up(self, line: bytes) -> None:
        """Send a line to the parent, if there is one."""
        self.post(line, to=range(self._rank))

    def post_down(self, line: bytes) -> None:
        """Send a line to the children."""
        self.post(line, to=self._children)

    def answer(self, line: bytes) -> None:
        """Send a line to those that are not ranks, and have asked."""
        for stranger in list(self._strangers):
            if stranger.asks:
                self._send(stranger, line)

    def flush(self, seconds: float) -> None:
        """Wait, with a time limit, until all posts are sent; another thread must be polling."""
        deadline = time.monotonic() + seconds
        while self._backlogged and time.monotonic() < deadline:
            time.sleep(0.005)

    def wake(self) -> None:
        """End the poll of the other thread; safe in a signal handler."""
        with suppress(OSError):  # full, or closed
            self._wake.send(b"x")

    def poll(self, seconds: float) -> list[Event]:
        """Wait, with a time limit, for data; send what is unsent."""
        for connection in list(self._backlogged):
            self._selector.modify(connection.socket, _READ | _WRITE, connection)
        seconds = min(seconds, max(0.0, self._next_look - time.monotonic()))
        events: list[Event] = []
        for key, _ in self._selector.select(seconds):
            if key.fileobj is self._woken:
                self._woken.recv(4096)
            elif key.fileobj is self._listener:
                self._accept()
            else:
                events += self._serve(key.data)
        self._drop_strangers()
        if time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + _LOOK
            self._accepted = 0
            self._listen(not self._leaving)
            events += self._end_silent()
        return events

    def _end_silent(self) -> Iterator[Event]:
        """Close connections to hosts that answer neither the kernel's keep-alive probes nor new connections.

        The kernel sends no probes while it retransmits at growing intervals, so new connections are tried. Checks are
        counted, not seconds: nobody checked while this process or its machine was stopped.
        """
        for rank, connection in list(self._ranks.items()):
            before = connection.segments
            connection.segments = segments_received(connection.socket)
            if connection.segments != before or not before or connection.probes.are_answered():
                connection.silent = 0
                connection.probes.close()
                continue
            connection.silent += 1
            if connection.silent == _SILENT:
                self._drop(connection)
                yield Event(rank, None, silent=True)
            elif connection.silent >= _DOUBTFUL:
                connection.probes.begin(connection.socket)

    def shutdown(self, seconds: float) -> Iterator[Event]:
        """Close in good order: send what is unsent, then read, with a time limit, until the others have closed.

        Closing with unread data would discard the last messages on their way to the other side.
        """
        self._leaving = True
        self._listen(False)
        for connection in list(self._ranks.values()):
            self._send(connection, b"")
        deadline = time.monotonic() + seconds
        while self._ranks and time.monotonic() < deadline:
            yield from self.poll(deadline - time.monotonic())

    def detach(self) -> list[int]:
        """Close all but the connections to ranks; return the descriptors of these."""
        kept = [connection.socket.detach() for connection in self._ranks.values()]
        self._ranks.clear()
        self.close()
        return kept

    def close(self) -> None:
        """Close this process's ends of all connections."""
        for connection in (*self._ranks.values(), *self._strangers):
            connection.socket.close()
            connection.probes.close()
        for sock in (self._listener, self._wake, self._woken):
            if sock is not None:
                sock.close()
        self._selector.close()

    # Accept connections.

    def _listen(self, on: bool) -> None:
        if self._listener is None or on == self._listens:
            return
        self._listens = on
        if on:
            self._selector.register(self._listener, _READ)
        else:
            self._selector.unregister(self._listener)

    def _accept(self) -> None:
        assert self._listener is not None
        self._accepted += 1
        if self._accepted > _MAX_ACCEPTED + len(self._children):
            self._listen(False)  # until the next check
            return
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            if error.errno in _OUT_OF_RESOURCES:  # else the connection is gone again
                self._listen(False)
                self._warn_of_limit(error)
            return
        sock.setblocking(False)
        connection = _Connection(sock)
        self._selector.register(sock, _READ, connection)
        self._strangers[connection] = None

    def _warn_of_limit(self, error: OSError) -> None:
        if not self._has_warned:
            self._has_warned = True
            self._say(f"The watch cannot accept a connection: {error}. Raise the limit on open files (ulimit -n).")

    def _drop_strangers(self) -> None:
        """Close the connections of strangers that take too long, or the oldest of too many."""
        late = time.monotonic() - _TOKEN_SECONDS
        while self._strangers:
            oldest = next(iter(self._strangers))
            if oldest.since > late and len(self._strangers) <= _MAX_STRANGERS + len(self._children):
                break
            self._drop(oldest)

    # Receive.

    def _serve(self, connection: _Connection) -> Iterator[Event]:
        try:
            self._send(connection, b"")
            if connection not in self._backlogged:
                self._selector.modify(connection.socket, _READ, connection)
            yield from self._read(connection)
        except Exception:
            if connection.rank is not None:
                raise
            self._drop(connection)  # no stranger may end the watch

    def _read(self, connection: _Connection) -> Iterator[Event]:
        try:
            data = connection.socket.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        for line in connection.lines.feed(data):
            event = self._receive(connection, line)
            if event is not None:
                yield event
            if not connection.open:
                return
        rest = connection.lines.rest
        if not data:
            self._drop(connection)
            if connection.exiting and len(rest) == 1:  # the last byte of an exiting process
                yield Event(connection.rank, Message(code=rest[0]))
            if connection.rank is not None:
                yield Event(connection.rank, None)
        elif connection.rank is None and len(rest) > _TOKEN_BYTES:
            self._drop(connection)

    def _receive(self, connection: _Connection, line: bytes) -> Event | None:
        if connection.rank is None:
            return self._admit(connection, line)
        if connection.exiting and not line:  # exit code 10 is a newline
            return Event(connection.rank, Message(code=ord("\n")))
        message = parse(line, self._world_size)
        if message is None or message.rank is not None:
            return None
        connection.exiting = connection.exiting or message.exiting == connection.rank
        return Event(connection.rank, message)

    def _admit(self, connection: _Connection, line: bytes) -> Event | None:
        """Read a stranger's first line: it becomes a rank's connection, or is closed."""
        message = (shows_token(line, self._token) and parse(line, self._world_size)) or Message()
        if message.rank in self.absent() and not self.is_full:  # else that rank has one
            self._adopt(connection, message.rank)
            self._send(connection, self._announcement)
            return None
        if message.asks:
            connection.asks = True
            return Event(None, Message(asks=True))  # everything else in it is ignored
        self._drop(connection)
        if message.failure is None or message.failure.rank >= 0:  # only a rank may report a rank's failure
            return None
        return Event(None, Message(failure=message.failure))

    def _adopt(self, connection: _Connection, rank: int) -> None:
        self._strangers.pop(connection, None)
        connection.rank = rank
        self._ranks[rank] = connection
        with suppress(OSError):  # it may be gone; reading will tell
            keep_alive(connection.socket)
        self.is_full = self.is_full or not self.absent()

    def _drop(self, connection: _Connection) -> None:
        with self._lock:
            connection.open = False
            self._backlogged.discard(connection)
            self._selector.unregister(connection.socket)
            connection.socket.close()
        connection.probes.close()
        self._strangers.pop(connection, None)
        if connection.rank is not None:
            del self._ranks[connection.rank]

    # Send.

    def _send(self, connection: _Connection, line: bytes) -> None:
        with self._lock:
            if not connection.open:
                return
            connection.unsent += line
            try:
                while connection.unsent:
                    sent = connection.socket.send(connection.unsent)
                    del connection.unsent[:sent]
            except BlockingIOError:
                self._backlogged.add(connection)
                return
            except OSError:  # it is gone; reading will tell
                connection.unsent.clear()
            self._backlogged.discard(connection)
            if self._leaving:
                with suppress(OSError):
                    connection.socket.shutdown(socket.SHUT_WR)


# Single connections.

_SEGMENTS = slice(140, 144)  # where Linux's struct tcp_info has tcpi_segs_in


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


class Probes:
    """New connections to the other end of a connection, as probes: its host answers, if only by a refusal."""

    def __init__(self) -> None:
        self._sockets: list[socket.socket] = []

    def begin(self, connection: socket.socket) -> None:
        """Start another; of the earlier ones only the last continues."""
        self.close(but=1)
        with suppress(OSError):
            probe = socket.socket(connection.family)
            self._sockets.append(probe)
            probe.setblocking(False)
            probe.connect_ex(connection.getpeername())

    def are_answered(self) -> bool:
        """Return whether the host answered one."""
        return any(map(_is_answered, self._sockets))

    def close(self, but: int = 0) -> None:
        """Abandon all but the last ones."""
        while len(self._sockets) > but:
            self._sockets.pop(0).close()


def _is_answered(probe: socket.socket) -> bool:
    if probe.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == errno.ECONNREFUSED:
        return True
    with suppress(OSError):
        probe.getpeername()
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
