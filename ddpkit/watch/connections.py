"""The connections of the watch: a tree with rank 0 at its top, open to its ranks and shut to everybody else.

Nothing here blocks, so that no peer, slow, stopped or hostile, keeps the others from being heard. A stranger, which is
a connection that has not shown the token in its first line, has little time and memory, and nothing that it sends is
interpreted.
"""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

from ..parsing import encode
from .links import Attempts, children_of, keep_alive, parent_of, segments_received
from .messages import Lines, Message, parse, shows_token

_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE
_MAX_STRANGERS = 64  # connections, beyond those of the ranks, that may be open without having shown the token
_TOKEN_SECONDS = 30.0  # in which they must
_TOKEN_BYTES = 200_000  # in which they must
_MAX_ACCEPTED = 100  # connections that are accepted between two looks, beyond those of the ranks
_LOOK = 1.0  # seconds between looks whether anything has come from each rank
_DOUBTFUL = 2  # looks in a row without anything, from which on the rank's host is asked in a second way
_SILENT = 9  # the same, after which its connection has ended
_OUT_OF_RESOURCES = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


@dataclass(frozen=True)
class Event:
    """A rank's message, or the end of its connection; `rank` is None for a message of no rank, with the token."""

    rank: int | None
    message: Message | None  # None when the connection has ended
    silent: bool = False  # whether it has ended because nothing came any more


@dataclass(eq=False)
class _Connection:
    socket: socket.socket
    rank: int | None = None
    since: float = field(default_factory=lambda: time.monotonic())  # read when called: tests have a clock of their own
    lines: Lines = field(default_factory=Lines)
    taken: int = 0  # bytes
    unsent: bytearray = field(default_factory=bytearray)
    open: bool = True
    asks: bool = False  # whether it has shown the token to ask what the ranks are doing
    exiting: bool = False  # whether its process is about to end, and its exit code to come
    segments: int = 0  # that have come until the last look
    silent: int = 0  # looks in a row since then
    attempts: Attempts = field(default_factory=lambda: Attempts())  # looked up when called: tests have others


def _last_events(connection: _Connection) -> list[Event]:
    """Return the last byte of a process that was about to end, its exit code, and the end of a rank's connection."""
    if connection.rank is None:
        return []
    events = []
    code = connection.lines.rest()
    if connection.exiting and len(code) == 1:
        events.append(Event(connection.rank, Message(code=code[0])))
    events.append(Event(connection.rank, None))
    return events


class Connections:
    """This rank's connections in the tree: to its children, and to its parent.

    One thread polls; any thread may post.

    Args:
        rank: This process's rank.
        world_size: Number of ranks in the job.
        token: The secret of this start of the job.
        listener: The socket to which the children connect, if this rank has some. It is closed with the connections.
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
        self._strangers: dict[_Connection, None] = {}  # in the order in which they came
        self._behind: set[_Connection] = set()  # with something unsent
        self._writing: set[_Connection] = set()  # for which the selector waits until there is room
        self._lock = threading.Lock()  # around what is sent
        self._listener = listener
        self._listens = False
        self._accepted = 0  # connections since the last look
        self._complained = False  # that nothing can be accepted
        self._next_look = 0.0
        self._leaving = False
        self._news = b""  # for those that connect later
        self.full = threading.Event()  # set when all children are connected
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._woken.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._woken, _READ)
        if listener is not None:
            listener.setblocking(False)
            self._listen(True)
        if not self._children:
            self.full.set()

    def connect(self, sock: socket.socket) -> None:
        """Take this socket for the connection to the parent."""
        sock.setblocking(False)
        connection = _Connection(sock)
        # before anything else that is posted
        connection.unsent += encode(token=self._token, rank=self._rank) + self._news
        self._adopt(connection, parent_of(self._rank))
        self._selector.register(sock, _READ, connection)  # last, for the other thread may be polling
        self._send(connection, b"")
        self.wake()

    def absent(self) -> list[int]:
        """Return the children that are not connected."""
        return [rank for rank in self._children if rank not in self._ranks]

    def post(self, line: bytes, exclude: int | None = None, to: Collection[int] | None = None) -> None:
        """Send a line to ranks that are connected here: at once what the kernel takes, the rest later.

        Args:
            line: What to send.
            exclude: A rank that is passed over.
            to: The ranks; by default all.
        """
        for rank, connection in list(self._ranks.items()):
            if rank != exclude and (to is None or rank in to):
                self._send(connection, line)
        if self._behind:
            self.wake()

    def post_news(self, line: bytes, exclude: int | None = None) -> None:
        """Send a line to all ranks that are connected here, and to those that will be."""
        self._news = line
        self.post(line, exclude)

    def post_up(self, line: bytes) -> None:
        """Send a line to the parent, if there is one."""
        self.post(line, to=range(self._rank))

    def post_down(self, line: bytes) -> None:
        """Send a line to the children."""
        self.post(line, to=self._children)

    def answer(self, line: bytes) -> None:
        """Send a line to those who are no ranks, and have asked."""
        for stranger in list(self._strangers):
            if stranger.asks:
                self._send(stranger, line)

    def settle(self, seconds: float) -> None:
        """Wait until all that was posted is on its way, at most so long; another thread must be polling."""
        deadline = time.monotonic() + seconds
        while self._behind and time.monotonic() < deadline:
            time.sleep(0.005)

    def wake(self) -> None:
        """End the poll of the other thread."""
        with contextlib.suppress(OSError):  # full, or closed
            self._wake.send(b"x")

    def poll(self, seconds: float) -> list[Event]:
        """Wait for what comes, at most so long; send what is still unsent."""
        if self._behind or self._writing:
            self._select_writable()
        seconds = min(seconds, max(0.0, self._next_look - time.monotonic()))
        events: list[Event] = []
        for key, _ in self._selector.select(seconds):
            if key.fileobj is self._woken:
                self._woken.recv(4096)
            elif key.fileobj is self._listener:
                self._accept()
            else:
                events += self._serve(key.data)
        if self._strangers:
            self._dismiss()
        if time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + _LOOK
            self._accepted = 0
            self._listen(not self._leaving)
            events += self._end_silent()
        return events

    def _end_silent(self) -> list[Event]:
        """End the connections to hosts that answer neither the kernel's questions nor attempts to connect once more.

        The kernel asks nothing while it waits ever longer to send again what was lost, hence the attempts. Looks are
        counted, not seconds: while this process or its machine was stopped nobody looked.
        """
        events = []
        for rank, connection in list(self._ranks.items()):
            before = connection.segments
            connection.segments = segments_received(connection.socket)
            if connection.segments != before or not before or connection.attempts.are_answered():
                connection.silent = 0
                connection.attempts.close()
                continue
            connection.silent += 1
            if connection.silent == _SILENT:
                self._drop(connection)
                events.append(Event(rank, None, silent=True))
            elif connection.silent >= _DOUBTFUL:
                connection.attempts.begin(connection.socket)
        return events

    def part(self, seconds: float) -> Iterator[Event]:
        """Take leave: send what is unsent, then read until the others have closed, at most so long.

        Closing over unread data would destroy our last words on their way to the other side.
        """
        self._leaving = True
        self._listen(False)
        for connection in list(self._ranks.values()):
            self._send(connection, b"")
        deadline = time.monotonic() + seconds
        while self._ranks and time.monotonic() < deadline:
            yield from self.poll(deadline - time.monotonic())

    def give_away(self) -> list[int]:
        """Close all but the connections to the ranks; return the descriptors of these."""
        kept = [connection.socket.detach() for connection in self._ranks.values()]
        self._ranks.clear()
        self.close()
        return kept

    def close(self) -> None:
        """Close this process's ends of all connections."""
        for connection in (*self._ranks.values(), *self._strangers):
            connection.socket.close()
            connection.attempts.close()
        for sock in (self._listener, self._wake, self._woken):
            if sock is not None:
                sock.close()
        self._selector.close()

    # Accepting

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
            self._listen(False)  # until the next look
            return
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            if error.errno in _OUT_OF_RESOURCES:  # else it has gone again
                self._listen(False)
                self._complain(error)
            return
        sock.setblocking(False)
        connection = _Connection(sock)
        self._selector.register(sock, _READ, connection)
        self._strangers[connection] = None

    def _complain(self, error: OSError) -> None:
        if not self._complained:
            self._complained = True
            self._say(f"The watch cannot accept a connection: {error}. Raise the limit on open files (ulimit -n).")

    def _dismiss(self) -> None:
        """Close the connections of strangers that take too long, or the oldest of too many."""
        late = time.monotonic() - _TOKEN_SECONDS
        while self._strangers:
            oldest = next(iter(self._strangers))
            if oldest.since > late and len(self._strangers) <= _MAX_STRANGERS + len(self._children):
                break
            self._drop(oldest)

    # Receiving

    def _serve(self, connection: _Connection) -> list[Event]:
        try:
            self._send(connection, b"")
            return self._read(connection)
        except Exception:
            if connection.rank is not None:
                raise
            self._drop(connection)  # no stranger shall end the watch
            return []

    def _read(self, connection: _Connection) -> list[Event]:
        if not connection.open:  # since the selector saw it
            return []
        try:
            data = connection.socket.recv(65536)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        events = []
        for line in connection.lines.feed(data):
            event = self._receive(connection, line)
            if event is not None:
                events.append(event)
            if not connection.open:
                return events
        connection.taken += len(data)
        if not data:
            self._drop(connection)
            events += _last_events(connection)
        elif connection.rank is None and connection.taken > _TOKEN_BYTES:
            self._drop(connection)
        return events

    def _receive(self, connection: _Connection, line: bytes) -> Event | None:
        if connection.rank is None:
            return self._admit(connection, line)
        if connection.exiting and not line:  # its exit code is 10, that of a newline
            return Event(connection.rank, Message(code=ord("\n")))
        message = parse(line, self._world_size)
        if message is None or message.rank is not None:
            return None
        connection.exiting = connection.exiting or message.exiting == connection.rank
        return Event(connection.rank, message)

    def _admit(self, connection: _Connection, line: bytes) -> Event | None:
        """Read a stranger's first line: it is a rank's connection from now on, or closed."""
        message = parse(line, self._world_size) if shows_token(line, self._token) else None
        if message is not None and message.rank is not None:
            self._admit_rank(connection, message.rank)
            return None
        if message is not None and message.asks:
            connection.asks = True
            return Event(None, Message(asks=True))  # and nothing else that it may say
        self._drop(connection)
        if message is None or message.failure is None:
            return None
        if message.failure.rank >= 0:  # of a rank only a rank may speak
            return None
        return Event(None, Message(failure=message.failure))

    def _admit_rank(self, connection: _Connection, rank: int) -> None:
        if rank in self.absent() and not self.full.is_set():
            self._adopt(connection, rank)
            self._send(connection, self._news)
            return
        self._drop(connection)  # there is one of that rank already

    def _adopt(self, connection: _Connection, rank: int) -> None:
        self._strangers.pop(connection, None)
        connection.rank = rank
        self._ranks[rank] = connection
        with contextlib.suppress(OSError):  # it may have gone already; reading will tell
            keep_alive(connection.socket)
        if not self.absent():
            self.full.set()

    def _drop(self, connection: _Connection) -> None:
        with self._lock:
            connection.open = False
            self._behind.discard(connection)
            self._selector.unregister(connection.socket)
            connection.socket.close()
        connection.attempts.close()
        self._strangers.pop(connection, None)
        if connection.rank is not None:
            del self._ranks[connection.rank]

    # Sending

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
                self._behind.add(connection)
                return
            except OSError:  # it has gone; reading will tell
                connection.unsent.clear()
            self._behind.discard(connection)
            if self._leaving:
                with contextlib.suppress(OSError):
                    connection.socket.shutdown(socket.SHUT_WR)

    def _select_writable(self) -> None:
        """Ask the selector for those connections on which something is unsent, and only for those."""
        behind = set(self._behind)
        for connection in behind ^ self._writing:
            if connection.open:
                mask = _READ | _WRITE if connection in behind else _READ
                self._selector.modify(connection.socket, mask, connection)
        self._writing = behind
