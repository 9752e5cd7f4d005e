"""Puts a simulated world in the place of the real one, under the modules of the protocol, which are not changed.

What these modules touch of the outside they name by few words: `time`, `threading`, `socket`, `selectors`, `os`, and
torch's stores. In this process, those words mean the simulated ones from then on.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import torch.distributed as dist
from network import Attempts, Network, Selector, Socket, pair
from store import PrefixStore, Server, Store
from world import Killed, Process, Task, World

from ddpkit import job, rendezvous, survival, watch
from ddpkit.errors import LaunchError
from ddpkit.job import joining as startup
from ddpkit.rendezvous import causes, session, sockets
from ddpkit.rendezvous import members as member
from ddpkit.survival import regrouping
from ddpkit.watch import connections, main_thread, thread

_NEVER = float("inf")


class _Now:
    """The world that is simulated now."""

    world: World
    network: Network


def begin(seed: int, is_told: Callable[[float, str], None] | None = None) -> World:
    """Begin a world; all that the protocol touches from now on is in it."""
    _Now.world = World(seed, is_told)
    _Now.network = Network(_Now.world)
    return _Now.world


def running() -> Process:
    """Return the simulated process that is running."""
    return _Now.world.running


def cut(one: str, other: str) -> None:
    """Cut the network between two hosts."""
    _Now.network.cut(one, other)


def lose(share: float) -> None:
    """Lose this share of what is sent between two hosts over connections that are made from now on."""
    _Now.network.loss = share


def note(line: str) -> None:
    """Tell of an event of the running process."""
    _Now.world.note(f"{_Now.world.running.name}: {line}")


# time


def monotonic() -> float:
    """Return the simulated time."""
    return _Now.world.now


def sleep(seconds: float) -> None:
    """Let a simulated thread sleep."""
    _Now.world.sleep(seconds)


TIME = SimpleNamespace(monotonic=monotonic, sleep=sleep, time=monotonic, perf_counter=monotonic)


# threading


class _Thread:
    def __init__(self, target: Callable[[], object], daemon: bool = True, name: str = "") -> None:
        self._target = target

    def start(self) -> None:
        self._task = _Now.world.running.start(self._target)

    def join(self, timeout: float | None = None) -> None:
        self._task.join(timeout)

    def is_alive(self) -> bool:
        return not self._task.is_done


def _start(self: Any) -> None:
    """Start what is a thread by inheritance."""
    self._task = _Now.world.running.start(self.run)


class _Lock:
    def __init__(self) -> None:
        self._is_taken = False
        self._waiting: list[Task] = []

    def __enter__(self) -> None:
        world = _Now.world
        while self._is_taken:
            assert world.current is not None
            self._waiting.append(world.current)
            world.suspend(None)
        self._is_taken = True

    def __exit__(self, *_: object) -> None:
        self._is_taken = False
        waiting, self._waiting = self._waiting, []
        for task in waiting:
            _Now.world.wake(task)


class _Event:
    def __init__(self) -> None:
        self._is_set = False
        self._waiting: list[Task] = []

    def is_set(self) -> bool:
        return self._is_set

    def clear(self) -> None:
        self._is_set = False

    def set(self) -> None:
        self._is_set = True
        for task in self._waiting:
            _Now.world.wake(task)

    def wait(self, seconds: float | None = None) -> bool:
        world = _Now.world
        deadline = _NEVER if seconds is None else world.now + seconds
        assert world.current is not None
        while not self._is_set and world.now < deadline:
            self._waiting.append(world.current)
            world.sleep_until(deadline)
            self._waiting.remove(world.current)
        return self._is_set


def _get_ident() -> int:
    return id(_Now.world.current)


def _current_thread() -> Any:
    return SimpleNamespace(ident=id(_Now.world.current), task=_Now.world.current)


_threading = SimpleNamespace(
    Thread=_Thread, Lock=_Lock, Event=_Event, get_ident=_get_ident, current_thread=_current_thread
)


# socket, selectors, os


def _socketpair() -> tuple[Socket, Socket]:
    process = _Now.world.running
    return pair(_Now.world, process, process)


def _hostname() -> str:
    return _Now.world.running.host


_socket = SimpleNamespace(socketpair=_socketpair, gethostname=_hostname, SHUT_WR=socket.SHUT_WR, socket=Socket)
_selectors = SimpleNamespace(
    DefaultSelector=lambda: Selector(_Now.world),
    EVENT_READ=selectors.EVENT_READ,
    EVENT_WRITE=selectors.EVENT_WRITE,
)


def _exit(code: int) -> None:
    _Now.world.running.end(code)
    raise Killed


def _getpid() -> int:
    return _Now.world.running.pid


_os = SimpleNamespace(_exit=_exit, getpid=_getpid, write=lambda *_: 0, register_at_fork=lambda **_: None)
_os.environ, _os.path, _os.urandom, _os.fsencode = os.environ, os.path, os.urandom, os.fsencode


def _connect(host: str, port: int, timeout: float) -> Socket:
    return _Now.network.connect((host, port), timeout)


def _listen(address: str, one_node: bool) -> tuple[Any, tuple[str, int]]:
    listener = _Now.network.listen()
    return listener, listener.address


# torch's stores


class HostedStore(Store):
    """What `dist.TCPStore` is for the process that hosts one, until nothing refers to it any more."""

    def __init__(self, address: str, port: int, is_master: bool = True, wait_for_workers: bool = False) -> None:
        world = _Now.world
        try:
            self._listener = _Now.network.listen(address, port)
        except OSError as error:
            raise dist.DistNetworkError(str(error)) from None
        super().__init__(Server(world, world.running))
        self.host, self.port = self._listener.address
        _Now.network.stores[self._listener.address] = self.server

    def __del__(self) -> None:
        if hasattr(self, "_listener"):
            self._listener.close()
            self.server.is_closed = True


def connect_to_store(address: str, port: int, timeout: Any) -> Store:
    """Connect to the store that a process hosts."""
    try:
        _Now.network.connect((address, port), timeout.total_seconds()).close()
    except OSError as error:
        raise LaunchError(f"no store at {address}:{port}: {error}") from None
    return Store(_Now.network.stores[address, port], timeout)


def _wait_for_listener(address: str, port: int, deadline: float) -> None:
    while not sockets.probe(address, port):
        if monotonic() > deadline:
            raise LaunchError(f"Nobody answers at {address}:{port}")
        sleep(0.02)


DIST = SimpleNamespace(
    **{name: getattr(dist, name) for name in ("DistNetworkError", "DistStoreError", "DistError", "Backend")},
    is_initialized=lambda: True,
    get_process_group_ranks=lambda _: _Now.world.running.ranks,
    PrefixStore=PrefixStore,
    TCPStore=HostedStore,
    Store=Store,
    HashStore=lambda: Store(Server(_Now.world, None)),
)


# The main thread


class MainThread(main_thread.MainThread):
    """A main thread in a simulated process: its signals are the world's, and it deals with a failure by ending."""

    def __init__(self, session: Any, wake: Callable[[], None]) -> None:
        super().__init__(session, wake)
        self._process = _Now.world.running

    def _take_signal(self) -> int:
        return 1

    def _is_mine(self) -> bool:
        return True

    def has_ended(self) -> bool:
        return self._process.main is None or self._process.main.is_done

    def handles_failure(self) -> bool:
        return self._process.handles_failure

    def send_signal(self) -> None:
        now = monotonic()
        self._first_signal_at = min(self._first_signal_at, now)
        self.next_signal_at = now + _Now.world.random.uniform(0, 0.5)
        self._process.interrupt(lambda: self._raise(1, None))

    def reason(self) -> str:
        return "did not end"

    def close(self) -> None:
        pass


class _NoReport:
    """What a rank is doing is not asked here."""

    def __init__(self, *_: object) -> None:
        pass

    def begin(self, seconds: float) -> bool:
        return False

    def take(self, at_once: bool = False) -> list[str]:
        return []


def _is_alive(self: member.Member) -> bool | None:
    """Return whether a claim's process lives; None where that cannot be seen from here."""
    if self.host != _hostname():
        return None
    return any(process.pid == self.pid and not process.is_dead for process in _Now.world.processes)


def _claim(*args: Any) -> member.Member:
    """Make the claim of the running process."""
    process = _Now.world.running
    place = {"host": process.host, "machine": ("simulated",), "pid": process.pid, "born": f"{process.pid}"}
    return member.Member(*args, **place, cores="0", nonce=f"{_Now.world.random.getrandbits(64):x}")


def _cut(some: Any, after: float = 0.0) -> None:
    if some:
        _Now.world.sleep(after)
        for act in some:
            act()


def _send_exit_code(connections: list[Socket]) -> None:
    """Let the end of the process write its exit code."""
    process = _Now.world.running

    def write() -> None:
        for connection in connections:
            connection._transmit(bytes([(process.code or 0) & 255]))

    process.at_end.insert(0, write)


def _modules_of(*packages: ModuleType) -> Iterator[ModuleType]:
    for package in packages:
        for found in pkgutil.iter_modules(package.__path__):
            yield importlib.import_module(f"{package.__name__}.{found.name}")


def put_in_place() -> None:
    """Put the simulated world under the modules of the protocol, for good in this process."""
    words = {"time": TIME, "threading": _threading, "socket": _socket, "selectors": _selectors, "dist": DIST}
    real = {"time": time, "threading": threading, "socket": socket, "selectors": selectors, "dist": dist}
    calls = {sockets.connect: _connect, sockets.listen: _listen, sockets.cut: _cut}
    for module in _modules_of(rendezvous, job, watch, survival):
        for word, simulated in words.items():
            if getattr(module, word, None) is real[word]:
                setattr(module, word, simulated)
        for call, simulated in calls.items():
            if getattr(module, call.__name__, None) is call:
                setattr(module, call.__name__, simulated)
    main_thread.random = SimpleNamespace(SystemRandom=lambda: _Now.world.random)
    main_thread.threading = SimpleNamespace(main_thread=_current_thread, current_thread=_current_thread)
    member.Member.is_alive = _is_alive
    thread.MainThread = MainThread
    thread.StatusReport = _NoReport
    thread.WatchThread.show_ranks = lambda _: None
    thread.os = _os
    thread.send_exit_code = _send_exit_code
    thread._log = lambda *_: None
    connections.keep_alive = Socket.keep_alive
    connections.segments_received = Socket.segments_received
    connections.Probes = Attempts
    session.os = _os
    for kind in (thread.WatchThread, regrouping._Heartbeat, regrouping.Refusals):
        kind.start, kind.join, kind.is_alive = _start, _Thread.join, _Thread.is_alive
    regrouping.connect_to_store = startup.connect_to_store = connect_to_store
    startup.wait_for_listener = _wait_for_listener
    regrouping.host_address = lambda _: _hostname()
    regrouping.sockets = SimpleNamespace(sockets_on=lambda _: set(), sockets_to=lambda _: set())
    regrouping.host_on = lambda host: HostedStore(host, 0)
    startup.Member = _claim
    startup.reachable = lambda *_: _hostname()
    startup.connections_to = lambda store: {store.cut}
    startup.current_group = lambda: None
    startup.reference = lambda _: lambda: None
    causes.current_group = lambda: None
    causes.other_groups_were_made = lambda: False
