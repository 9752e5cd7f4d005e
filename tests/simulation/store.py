"""torch's key-value store in a simulated world: a call takes time on the way there and on the way back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist
from world import Process, Task, World

T = TypeVar("T")


class Server:
    """What a store keeps, in the process that hosts it; None for one that outlives all."""

    def __init__(self, world: World, host: Process | None) -> None:
        self.world = world
        self.host = host
        self.is_closed = False
        self.values: dict[str, bytes] = {}


class Store:
    """A process's connection to a store, with the methods of torch's.

    Args:
        server: What it is connected to.
        timeout: How long `get` waits for a key.
    """

    def __init__(self, server: Server, timeout: timedelta = timedelta(seconds=300)) -> None:
        self.server = server
        self.timeout = timeout
        self._is_broken = False
        self._waiting: list[Task] = []  # threads whose call has no answer

    def cut(self) -> None:
        """End the connection, and with it the calls that wait for an answer."""
        self._is_broken = True
        for task in self._waiting:
            self.server.world.wake(task)

    def _call(self, act: Callable[[], T]) -> T:
        """Do something at the server: neither the way there nor the way back can be interrupted by a signal."""
        world = self.server.world
        world.pause()
        self._reach()
        result = act()
        world.pause()
        self._reach()
        assert world.current is not None
        if world.current is world.running.main:
            world.running.handle_signals()
        return result

    def _reach(self) -> None:
        """Wait while the server does not answer; raise if it has gone."""
        host = self.server.host
        if host is not None:
            self._wait_for(host)
            self._is_broken = self._is_broken or host.is_dead or self.server.is_closed
        if self._is_broken:
            raise dist.DistNetworkError("the connection was closed")

    def _wait_for(self, host: Process) -> None:
        world = self.server.world
        assert world.current is not None
        self._waiting.append(world.current)
        while not self._is_broken and world.is_cut(world.running.host, host.host):
            world.suspend(None)
        while not self._is_broken and host.is_stopped and not host.is_dead:
            host.wait_for_answer()
        self._waiting.remove(world.current)

    def set(self, key: str, value: str | bytes) -> None:
        """Write a value."""
        self._call(lambda: self._set(key, value))

    def _set(self, key: str, value: str | bytes) -> None:
        self.server.values[key] = value.encode() if isinstance(value, str) else value

    def get(self, key: str) -> bytes:
        """Read a value; wait until it is there."""
        world = self.server.world
        deadline = world.now + self.timeout.total_seconds()
        while True:
            found = self._call(lambda: self.server.values.get(key))
            if found is not None:
                return found
            if world.now > deadline:
                raise dist.DistStoreError(f"wait timeout, keys: {key}")
            world.suspend(world.now + 0.01)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Read several values."""
        found = self._call(lambda: [self.server.values.get(key) for key in keys])
        return [self.get(key) if value is None else value for key, value in zip(keys, found, strict=True)]

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all are there."""
        return self._call(lambda: all(key in self.server.values for key in keys))

    def add(self, key: str, amount: int) -> int:
        """Add to a number."""
        return self._call(lambda: self._add(key, amount))

    def _add(self, key: str, amount: int) -> int:
        total = int(self.server.values.get(key, b"0")) + amount
        self.server.values[key] = str(total).encode()
        return total

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Write a value unless another is there; return what is there then."""
        return self._call(lambda: self._compare_set(key, expected.encode(), desired.encode()))

    def _compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        values = self.server.values
        if values.get(key, b"") == expected:
            values[key] = desired
        return values.get(key, expected)

    def delete_key(self, key: str) -> bool:
        """Delete a value."""
        return self._call(lambda: self.server.values.pop(key, None) is not None)

    def list_keys(self) -> list[str]:
        """Return all keys."""
        return self._call(lambda: list(self.server.values))


class PrefixStore:
    """A store whose keys have a prefix, as torch's."""

    def __init__(self, prefix: str, store: Store | PrefixStore) -> None:
        self.underlying_store = store
        self._prefix = f"{prefix}/"

    def cut(self) -> None:
        self.underlying_store.cut()

    def set(self, key: str, value: str | bytes) -> None:
        self.underlying_store.set(self._prefix + key, value)

    def get(self, key: str) -> bytes:
        return self.underlying_store.get(self._prefix + key)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self.underlying_store.multi_get([self._prefix + key for key in keys])

    def check(self, keys: Sequence[str]) -> bool:
        return self.underlying_store.check([self._prefix + key for key in keys])

    def add(self, key: str, amount: int) -> int:
        return self.underlying_store.add(self._prefix + key, amount)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return self.underlying_store.compare_set(self._prefix + key, expected, desired)

    def delete_key(self, key: str) -> bool:
        return self.underlying_store.delete_key(self._prefix + key)

    def list_keys(self) -> list[str]:
        keys = self.underlying_store.list_keys()
        return [key.removeprefix(self._prefix) for key in keys if key.startswith(self._prefix)]
