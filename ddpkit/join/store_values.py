"""Reading the store, where any program that reaches the port may write: each value is checked first."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar, cast

import torch.distributed as dist

from ..parsing import refuse_text

# Polls that slow down, and calls that are given up after a time.

T = TypeVar("T")


class Pause:
    """Sleeps between polls: by default 50 microseconds at first, 20 milliseconds in the end."""

    def __init__(self, first: float = 50e-6, longest: float = 0.02) -> None:
        self._seconds = first
        self._longest = longest

    @classmethod
    def among(cls, ranks: int) -> Pause:
        """Return pauses that leave the store time for the polls of so many ranks."""
        return cls(max(50e-6, 5e-6 * ranks), min(max(0.02, 1e-3 * ranks), 1.0))

    def __call__(self) -> None:
        """Sleep, a little longer than the last time."""
        time.sleep(self._seconds)
        self._seconds = min(1.3 * self._seconds, self._longest)


class Question:
    """Asks again and again for a yes, each time on a thread of its own, unless the last answer has not come yet.

    Args:
        ask: It may never return, because a process that it asks is stopped, or raise `RuntimeError`, which is no yes.
        seconds: That are waited for an answer.
    """

    def __init__(self, ask: Callable[[], bool], seconds: float) -> None:
        self._ask = ask
        self._seconds = seconds
        self._is_yes = False
        self._thread: threading.Thread | None = None

    def is_yes(self) -> bool:
        """Ask, if no earlier question is open, and return whether the answer was yes once."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()
        self._thread.join(self._seconds)
        return self._is_yes

    def _run(self) -> None:
        with suppress(RuntimeError):
            self._is_yes = self._ask() or self._is_yes


def _nothing() -> None:
    pass


def call_with_timeout(work: Callable[[], T], seconds: float, check: Callable[[], None] = _nothing) -> T:
    """Call a function on a thread of its own, and return its value or raise its error.

    Args:
        work: It may never return, because a process that it asks is stopped.
        seconds: Time limit; after it `TimeoutError` is raised and the thread abandoned.
        check: Called about once a second meanwhile; it ends the wait by raising.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    deadline = time.monotonic() + seconds
    try:
        thread.start()
    except RuntimeError:  # Python 3.12.0 and 3.12.1 start none at exit
        run()
    else:
        while thread.is_alive() and time.monotonic() < deadline:
            thread.join(min(deadline - time.monotonic(), 1.0))
            check()
    if errors:
        raise errors.pop()  # this frame must not keep it, for its traceback keeps the frame
    if not results:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return results[0]


_PIECE = 1 << 20  # characters of a long text under one key


def read_text(store: dist.Store, key: str) -> str:
    """Read a text from the store.

    Raises:
        LaunchError: If it is none.
    """
    return _decode(store.get(key), key)


def read_texts(store: dist.Store, keys: list[str]) -> list[str]:
    """Read several texts in one call.

    Raises:
        LaunchError: If one of them is none.
    """
    return [_decode(data, key) for key, data in zip(keys, store.multi_get(keys), strict=True)]


def write_long(store: dist.Store, key: str, text: str) -> list[str]:
    """Write a text of any length; return the keys that this takes. It can be read once the first is there."""
    more = []
    for number, start in enumerate(range(_PIECE, len(text), _PIECE)):
        more.append(f"{key}/{number}")
        store.set(more[-1], text[start : start + _PIECE])
    store.set(key, f"{len(more)} {text[:_PIECE]}")
    return [key, *more]


def read_long(store: dist.Store, key: str) -> str:
    """Read a text that `write_long` wrote.

    Raises:
        LaunchError: If it is none.
    """
    found = read_text(store, key)
    more, space, text = found.partition(" ")
    if not space or not re.fullmatch("[0-9]{1,4}", more):
        refuse_text(found, key)
    if more == "0":
        return text
    return text + "".join(read_texts(store, [f"{key}/{number}" for number in range(int(more))]))


def _decode(data: bytes, key: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        refuse_text(data, key)


def add(store: dist.Store, key: str, amount: int) -> int:
    """Add to a counter of the store and return the sum.

    The store drops the connection of whoever adds to a text. So that nobody takes it for the end of its host, the key
    is read over another connection.

    Raises:
        LaunchError: If the key holds no number: no rank wrote it.
    """
    try:
        return int(store.add(key, amount))
    except (RuntimeError, ValueError):
        text = _read_over_new_connection(store, key)
        if text is not None and not re.match(rb"\s*[+-]?[0-9]{1,18}(?![0-9])", text):
            refuse_text(text, key)
        raise


def without_prefixes(store: dist.Store) -> dist.Store:
    """Return the store itself, which others show under a prefix."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


def _read_over_new_connection(store: dist.Store, key: str) -> bytes | None:
    """Read a key; return None if it or a connection is not to be had. torch 2.6 can make none."""

    def read() -> bytes | None:
        clone = cast(Any, store).clone()
        return bytes(clone.get(key)) if clone.check([key]) else None

    server = without_prefixes(store)
    try:
        if isinstance(server, dist.TCPStore):  # torch would go on trying for the whole time-out
            socket.create_connection((server.host, server.port), timeout=2).close()
        return call_with_timeout(read, 10.0)
    except (AttributeError, OSError, RuntimeError, ValueError):
        return None
