"""Connections in a simulated world: bytes arrive late, in pieces and in order, as TCP allows, or not at all."""

from __future__ import annotations

import itertools
import selectors
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from store import Server
from world import Process, Task, World

_DEAD_LINK = 9.0  # seconds after which the kernel gives up a connection
_DEAD_LINK_OF_WATCH = 900.0  # the same where `keep_alive` has been called
_AGAIN = 0.25  # seconds after which the kernel sends again what was lost; from the seventh time on twice as many
_FULL = 0.01  # the share of writes for which the kernel has no room


class Network:
    """All connections of a world.

    Attributes:
        stores: By their address.
        loss: The share of segments that are lost between two hosts.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.loss = 0.0
        self.stores: dict[tuple[str, int], Server] = {}
        self._listeners: dict[tuple[str, int], Listener] = {}
        self._ports = itertools.count(30000)
        self._connections: list[Socket] = []

    def listen(self, host: str | None = None, port: int = 0) -> Listener:
        """Open a listener of the running process, at its host's address or another, on a port that is free."""
        process = self.world.running
        address = (host or process.host, port or next(self._ports))
        if self.is_open(address):
            raise OSError("EADDRINUSE")
        listener = Listener(self.world, process, address)
        self._listeners[address] = listener
        return listener

    def is_open(self, address: tuple[str, int]) -> bool:
        """Return whether somebody listens there."""
        listener = self._listeners.get(address)
        return listener is not None and not listener.is_closed

    def connect(self, address: tuple[str, int], seconds: float) -> Socket:
        """Connect the running process to an address, at most so long."""
        world = self.world
        process = world.running
        world.pause()
        if world.is_cut(process.host, address[0]):
            world.sleep(seconds)
            raise TimeoutError("timed out")
        if not self.is_open(address):
            raise ConnectionRefusedError("nobody listens")
        listener = self._listeners[address]
        mine, other = pair(world, process, listener.process)
        if process.host != listener.process.host:
            mine.loss = other.loss = self.loss
        listener.arrive(other)
        self._connections += [mine, other]
        return mine

    def cut(self, one: str, other: str) -> None:
        """Let nothing pass between two hosts any more; keep-alive finds that out."""
        self.world.cut(one, other)
        for sock in self._connections:
            if not sock.is_closed and self.world.is_cut(sock.process.host, sock.peer.process.host):
                sock.cut()


class Descriptor:
    """What a selector waits for."""

    def __init__(self, world: World, process: Process) -> None:
        self.world = world
        self.process = process
        self.is_closed = False
        self.selectors: list[Selector] = []
        process.at_end.append(self.end)

    def changed(self) -> None:
        """Wake those who wait for it."""
        for selector in self.selectors:
            selector.wake()

    def is_readable(self) -> bool:
        """Return whether a read would not block."""
        raise NotImplementedError

    def is_writable(self) -> bool:
        """Return whether a write would not block."""
        return False

    def setblocking(self, flag: bool) -> None:
        """Do as sockets do, which never block here."""

    def end(self) -> None:
        """Close it, as the kernel does when the process has ended."""
        raise NotImplementedError


class Listener(Descriptor):
    """A socket that takes connections."""

    def __init__(self, world: World, process: Process, address: tuple[str, int]) -> None:
        super().__init__(world, process)
        self.address = address
        self._backlog: list[Socket] = []

    def arrive(self, sock: Socket) -> None:
        """Queue a connection."""
        self._backlog.append(sock)
        self.changed()

    def accept(self) -> tuple[Socket, Any]:
        """Take a connection."""
        if not self._backlog:
            raise BlockingIOError
        return self._backlog.pop(0), None

    def is_readable(self) -> bool:
        """Return whether a connection has come."""
        return bool(self._backlog)

    def close(self) -> None:
        """Close it, and what nobody has taken."""
        self.end()

    def end(self) -> None:
        """Close it, and what nobody has taken."""
        self.is_closed = True
        for sock in self._backlog:
            sock.end()


class Socket(Descriptor):
    """One end of a connection."""

    def __init__(self, world: World, process: Process) -> None:
        super().__init__(world, process)
        self.peer: Socket = self
        self._inbox = bytearray()
        self._has_ended = False  # the other end will send no more
        self._is_broken = False
        self._last_arrival = 0.0  # at the other end
        self._full_until = 0.0
        self._no_more = False
        self._is_reset = False  # what is on its way is lost
        self.loss = 0.0
        self._dead_link = _DEAD_LINK
        self._segments = 1

    # What a program calls

    def send(self, data: bytes | bytearray) -> int:
        """Send what there is room for."""
        world = self.world
        if world.is_over or self.process.is_dead:
            return len(data)
        if self.is_closed or self._no_more:
            raise OSError("closed")
        if self._is_broken:
            raise BrokenPipeError
        if not data:
            return 0
        if world.random.random() < _FULL or world.now < self._full_until:
            self._full_until = world.now + world.latency(self.process)
            world.at(self._full_until, self.changed)
            raise BlockingIOError
        self._transmit(bytes(data))
        return len(data)

    def sendall(self, data: bytes) -> None:
        """Send all."""
        self._transmit(data)

    def recv(self, size: int) -> bytes:
        """Return what has come; b"" at the end."""
        if self._inbox:
            data = bytes(self._inbox[:size])
            del self._inbox[:size]
            return data
        if self._is_broken:
            raise ConnectionResetError
        if self._has_ended:
            return b""
        raise BlockingIOError

    def shutdown(self, how: int) -> None:
        """Send no more."""
        if self.is_closed or self._is_broken:
            raise OSError("closed")
        if not self._no_more:
            self._no_more = True
            self._arrive_later(self.peer._take_end)

    def close(self) -> None:
        """Close this end; data that was not read breaks the connection."""
        self.end()

    def detach(self) -> Socket:
        """Give the connection away."""
        return self

    def getpeername(self) -> tuple[str, int]:
        """Return the other end's host."""
        return self.peer.process.host, 0

    def __enter__(self) -> Socket:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def keep_alive(self) -> None:
        """Let both kernels ask every second whether the other end is there."""
        self._dead_link = _DEAD_LINK_OF_WATCH

    def segments_received(self) -> int:
        """Return how many segments have come; this is called every second, in which both kernels ask."""
        answered = (1 - self.loss) ** 2
        if not self.is_lost(self.loss * (1 - answered)):
            self._segments += 1
        return self._segments

    # What the kernel does

    def is_readable(self) -> bool:
        """Return whether there is data, or the end."""
        return bool(self._inbox) or self._has_ended or self._is_broken

    def is_writable(self) -> bool:
        """Return whether there is room."""
        return self.world.now >= self._full_until

    def end(self) -> None:
        """Close this end."""
        if self.is_closed:
            return
        self.is_closed = True
        if self.world.is_over:
            return
        if self._inbox:
            self._is_reset = self.world.random.random() < 0.5
            self._arrive_later(self.peer._break)
        elif not self._no_more:
            self._no_more = True
            self._arrive_later(self.peer._take_end)

    def _transmit(self, data: bytes) -> None:
        cut = self.world.random.randrange(len(data) + 1)
        for piece in (data[:cut], data[cut:]):
            if piece:
                self._arrive_later(lambda piece=piece: self._deliver(piece))

    def _deliver(self, piece: bytes) -> None:
        if self._is_reset:
            return
        if self.peer.is_closed:
            self._arrive_later(self._break)
            return
        self.peer._inbox += piece
        self.peer.changed()

    def _arrive_later(self, act: Callable[[], None]) -> None:
        """Let something happen after all that was sent before."""
        world = self.world
        late = 0.0 if self.peer.process is self.process else world.latency(self.process)
        late += self._draw_losses()
        self._last_arrival = max(self._last_arrival, world.now + late)
        if world.is_cut(self.process.host, self.peer.process.host):
            world.at(world.now + self._dead_link, self._break)
            world.at(world.now + self.peer._dead_link, self.peer._break)
            return
        # a little later than the last, for two acts at one moment come in any order
        self._last_arrival += 1e-9
        world.at(self._last_arrival, act)

    def is_lost(self, share: float) -> bool:
        """Draw whether something is lost on its way, as this share is."""
        if self.world.is_cut(self.process.host, self.peer.process.host):
            return True
        return share > 0 and self.world.random.random() < share

    def _draw_losses(self) -> float:
        """Draw how long it takes until something arrives that may be lost several times."""
        times = 0
        while self.loss and self.world.random.random() < self.loss:
            times += 1
        return _AGAIN * (min(times, 6) + 2.0 ** max(times - 6, 0) - 1)

    def _take_end(self) -> None:
        self._has_ended = True
        self.changed()

    def _break(self) -> None:
        self._is_broken = True
        self.changed()

    def cut(self) -> None:
        """Membership, after a while, that nothing passes any more."""
        self.world.at(self.world.now + self._dead_link + self.world.random.random(), self._break)


class Attempts:
    """Attempts to connect to the host of a connection's other end once more."""

    def __init__(self) -> None:
        self._sock: Socket | None = None

    def begin(self, sock: Socket) -> None:
        """Begin another."""
        self._sock = sock

    def are_answered(self) -> bool:
        """Return whether the host has answered; this is called every second, in which the kernel tries once."""
        if self._sock is None:
            return False
        answered = (1 - self._sock.loss) ** 2
        return not self._sock.is_lost(1 - answered)

    def close(self) -> None:
        """Give them up."""
        self._sock = None


def pair(world: World, one: Process, other: Process) -> tuple[Socket, Socket]:
    """Make both ends of a connection."""
    first, second = Socket(world, one), Socket(world, other)
    first.peer, second.peer = second, first
    return first, second


class Selector:
    """Waits for connections, as `selectors.DefaultSelector` does."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._keys: dict[Descriptor, tuple[int, Any]] = {}
        self._waiting: Task | None = None

    def register(self, what: Descriptor, mask: int, data: Any = None) -> None:
        """Wait for this, too."""
        self._keys[what] = mask, data
        what.selectors.append(self)
        self.wake()

    def modify(self, what: Descriptor, mask: int, data: Any = None) -> None:
        """Wait for something else of it."""
        self._keys[what] = mask, data

    def unregister(self, what: Descriptor) -> None:
        """Wait for it no more."""
        if self._keys.pop(what, None) is not None:
            what.selectors.remove(self)

    def wake(self) -> None:
        """Look again."""
        if self._waiting is not None:
            self._world.wake(self._waiting, self._world.latency(self._waiting.process))

    def select(self, seconds: float) -> list[tuple[Any, int]]:
        """Wait until something can be read or written, at most so long."""
        ready = self._ready()
        deadline = self._world.now + seconds
        while not ready and self._world.now < deadline:
            self._waiting = self._world.current
            self._world.suspend(deadline)
            self._waiting = None
            ready = self._ready()
        return ready

    def _ready(self) -> list[tuple[Any, int]]:
        found = []
        for what, (mask, data) in list(self._keys.items()):
            events = selectors.EVENT_READ if mask & selectors.EVENT_READ and what.is_readable() else 0
            if mask & selectors.EVENT_WRITE and what.is_writable():
                events |= selectors.EVENT_WRITE
            if events:
                found.append((SimpleNamespace(fileobj=what, data=data), events))
        self._world.random.shuffle(found)
        return found

    def close(self) -> None:
        """Wait for nothing any more."""
        for what in list(self._keys):
            self.unregister(what)
