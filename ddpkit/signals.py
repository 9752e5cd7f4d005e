"""Handle, within blocks, the signals that ask a process to stop."""

from __future__ import annotations

import atexit
import math
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

_AGAIN = 2.0  # seconds in which another Ctrl-C counts as the same: torchrun forwards what ranks get from the terminal
_ENDING = 30.0  # seconds after a stop in which signals are ignored: srun ends ranks as soon as the first one exits


@dataclass(eq=False)
class Block:
    """A block in which signals are handled.

    Attributes:
        signals: Their numbers.
        ask: Called with the number of each signal that arrives.
        is_stopped: Whether, at the end of the block, such a signal has stopped the ranks.
    """

    signals: tuple[int, ...]
    ask: Callable[[int], None]
    is_stopped: bool = False


@dataclass
class _Process:
    """The state of signals in this process; only its main thread changes it."""

    blocks: list[Block] = field(default_factory=list)  # active blocks, the innermost last
    former: dict[int, Any] = field(default_factory=dict)  # the handlers that ours replace, by signal
    pid: int = 0
    interrupted_at: float = -math.inf
    over_at: float = -math.inf  # when the last block ended


_process = _Process()


def handled_signals() -> tuple[int, ...]:
    """Return the numbers of the handled signals."""
    return tuple({number: None for block in _process.blocks for number in block.signals})


@contextmanager
def handling(signals: Iterable[int], ask: Callable[[int], None]) -> Iterator[Block]:
    """Call `ask` with the number of each signal that arrives in this block, instead of its former handler.

    Another Ctrl-C, 2 s after the first or later, ends the process.

    Args:
        signals: Numbers of the signals.
        ask: Function to call.

    Raises:
        ValueError: If a signal cannot be handled, or this is not the main thread.
    """
    block = Block(tuple(dict.fromkeys(signals)), ask)
    _process.pid = os.getpid()
    try:
        for number in block.signals:
            _take_over(number)
    except BaseException:
        put_back_unused()
        raise
    if not _process.blocks:
        _process.interrupted_at = -math.inf
    _process.blocks.append(block)
    try:
        yield block
    finally:
        _process.blocks.remove(block)
        _process.over_at = time.monotonic()
        if not block.is_stopped:
            put_back_unused()


def _take_over(number: int) -> None:
    if number in _process.former and signal.getsignal(number) is _handle:
        return
    try:
        _process.former[number] = signal.signal(number, _handle)
    except (ValueError, OSError, TypeError) as error:
        raise ValueError(f"stopping() cannot handle signal {number!r}: {error}.") from error


def put_back_unused() -> None:
    """Restore the former handlers of signals that no block handles."""
    for number in _process.former.keys() - set(handled_signals()):
        _put_back(number)


def _put_back(number: int) -> None:
    former = _process.former.pop(number)
    if signal.getsignal(number) is _handle:
        signal.signal(number, former or signal.SIG_DFL)


@atexit.register
def _ignore_at_exit() -> None:
    """Ignore these signals while the interpreter exits: it restores defaults, which kill the process."""
    if os.getpid() != _process.pid:
        return
    for number in _process.former:
        if signal.getsignal(number) is _handle:
            signal.signal(number, signal.SIG_IGN)


def _handle(number: int, _: FrameType | None) -> None:
    asked = [block.ask for block in _process.blocks if number in block.signals]
    now = time.monotonic()
    if os.getpid() != _process.pid:
        _handle_in_child(number)
    elif not asked:
        _handle_after_the_block(number, now)
    elif number != signal.SIGINT:
        asked[-1](number)
    elif _process.interrupted_at == -math.inf:
        _process.interrupted_at = now
        asked[-1](number)
    elif now > _process.interrupted_at + _AGAIN:  # not the same Ctrl-C
        signal.signal(number, signal.SIG_DFL)
        os.kill(_process.pid, number)


def _handle_after_the_block(number: int, now: float) -> None:
    passed_over = _AGAIN if number == signal.SIGINT else _ENDING
    if now > _process.over_at + passed_over:
        _put_back(number)
        os.kill(_process.pid, number)


def _handle_in_child(number: int) -> None:
    """Let a forked child, such as a loader's worker, end as its rank does, or by SIGTERM as usual."""
    if number == signal.SIGTERM:
        _put_back(number)
        os.kill(os.getpid(), number)
