"""Raise a peer's failure in the main thread, whatever that is doing, until it ends or handles it.

A signal interrupts the main thread, even in a sleep, and its handler raises there. A task, a callback or a broad
`except` may lose that error. So it is raised again, except while an `except` or `finally` block handles it. Leaving a
`with` block that waits for threads or processes does not count as handling it, because they may never end.
"""

from __future__ import annotations

import _thread
import logging
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any, TypeVar

from ..errors import DdpkitError
from ..rendezvous.failures import GRACE
from ..rendezvous.session import Session
from ..rendezvous.sockets import FLUSH_SECONDS

_NEVER = float("inf")
_OWN_END = (KeyboardInterrupt, SystemExit)  # a peer's failure would replace it: Ctrl-C and SIGTERM reach all ranks
_PAUSE = 0.25  # seconds between signals, about
_PAUSE_LOST = 0.03  # most seconds until the next signal where the error would be lost
_PYTHON = os.path.dirname(os.__file__)
_ASYNCIO = os.path.join(_PYTHON, "asyncio", "")  # importing it here would be slow
# modules with an `__exit__` that waits for threads or processes
_WAITING = tuple(
    os.path.join(_PYTHON, name) for name in ("concurrent", "multiprocessing", "socketserver", "subprocess")
)
_REAL_TIME = range(getattr(signal, "SIGRTMAX", 0), getattr(signal, "SIGRTMIN", 0), -1)  # macOS has none
_SIGNALS: tuple[int, ...] = (*_REAL_TIME, signal.SIGURG)
_uninterrupted: set[CodeType] = set()
F = TypeVar("F", bound=Callable[..., Any])


def no_interrupt(function: F) -> F:
    """Prevent failures from being raised in a function and its calls."""
    _uninterrupted.add(function.__code__)
    return function


class MainThread:
    """The main thread of this process, in which a signal raises the failure that a session knows.

    Args:
        session: The session; its first failure is raised until it is settled.
        wake: Called from the main thread when `next_signal_at` has changed.
    """

    def __init__(self, session: Session, wake: Callable[[], None]) -> None:
        self._session = session
        self._wake = wake
        self._thread = threading.main_thread()
        self._caller = threading.current_thread()
        self._began = time.monotonic()  # older failures are those of an earlier job
        self.next_signal_at = _NEVER
        self._first_signal_at = _NEVER  # since a failure was last handled
        self._heard_at = -_NEVER  # when the failure became known
        self._handler_ran_at = -_NEVER
        self._signal = 0  # none
        if self._caller is self._thread:
            self._signal = self._take_signal()

    def signal_after(self, seconds: float) -> None:
        """Schedule the first signal in this many seconds, unless one is scheduled."""
        if self.next_signal_at == _NEVER:
            self._heard_at = time.monotonic()
            self.next_signal_at = self._heard_at + seconds

    def stop_signals(self) -> None:
        """Cancel the signals: there is nothing to raise."""
        self.next_signal_at = _NEVER
        self._first_signal_at = _NEVER

    def begin_again(self) -> None:
        """Schedule a signal, again the first, some time after the main thread last handled one."""
        self.next_signal_at = time.monotonic() + _PAUSE
        self._first_signal_at = _NEVER

    def has_ended(self) -> bool:
        """Return whether the main thread has ended, so that the process is exiting."""
        codes = [frame.f_code for frame in _outwards(sys._current_frames().get(self._thread.ident or 0))]
        shuts_down = bool(codes) and (codes[-1].co_filename, codes[-1].co_name) == (threading.__file__, "_shutdown")
        return shuts_down or not self._thread.is_alive()

    def handles_failure(self) -> bool:
        """Return whether a block of the main thread, or of the caller of `setup()`, handles a failure."""
        return any(self._handles_in(thread.ident or 0) for thread in (self._thread, self._caller))

    def send_signal(self) -> None:
        """Interrupt the main thread; its handler then raises."""
        now = time.monotonic()
        self._first_signal_at = min(self._first_signal_at, now)
        # out of step with the main thread's own periodic work
        self.next_signal_at = now + _random_below(2 * _PAUSE)
        if self._is_mine():
            # the first arrives even if the signal is blocked, the second even if the thread sleeps
            _thread.interrupt_main(self._signal)  # type: ignore[arg-type]
            signal.pthread_kill(self._thread.ident or 0, self._signal)

    def ignores_signal(self) -> bool:
        """Return whether the handler has not run, so that the thread is in a call that should have ended."""
        is_late = time.monotonic() > self._first_signal_at + 2 * FLUSH_SECONDS
        return is_late and self._handler_ran_at < self._first_signal_at

    def waits_for_store(self) -> bool:
        """Return whether it is in a wait on the store."""
        return self._thread.ident in self._session.deadlines

    def grace_is_over(self) -> bool:
        """Return whether the main thread has had its time to end or to handle the failure."""
        return time.monotonic() > self._first_signal_at + self._session.failures.grace

    def reason(self) -> str:
        """Explain why nothing could be raised in the main thread."""
        if self._caller is not self._thread:
            return "did not call setup(), so no error can be raised in it"
        if not self._signal:
            return "has its own handlers for all signals, so no error can be raised in it"
        if not self._is_mine():
            handler = signal.getsignal(self._signal)
            return f"cannot be interrupted, because the script has set a handler for signal {self._signal}: {handler}"
        if time.monotonic() < self._handler_ran_at + 1.0:
            return "kept running: the error raised in it was caught or lost each time"
        return "is in a call that does not return"

    def close(self) -> None:
        """Release the signal, if it is still ours."""
        if self._is_mine() and threading.current_thread() is self._thread:
            signal.signal(self._signal, signal.SIG_IGN)  # discards a pending one, which would kill
            signal.signal(self._signal, signal.SIG_DFL)

    def _take_signal(self) -> int:
        """Choose an unused signal: a real-time signal, which has no meaning, before one that has."""
        for number in _SIGNALS:
            handler = signal.getsignal(number)
            if handler == signal.SIG_DFL or isinstance(getattr(handler, "__self__", None), MainThread):
                signal.signal(number, self._raise)
                return number
        return 0

    def _is_mine(self) -> bool:
        return self._signal > 0 and signal.getsignal(self._signal) == self._raise

    def _raise(self, signum: int, frame: FrameType | None) -> None:
        failures = self._session.failures
        if failures.known is None or failures.muted or not self._session.is_own:
            return
        self._handler_ran_at = time.monotonic()
        if self.handles_failure():
            return
        if failures.held or _is_lost_in(frame):
            self.next_signal_at = time.monotonic() + _random_below(_PAUSE_LOST)
            self._wake()
            return
        self.next_signal_at = time.monotonic() + _PAUSE
        raise failures.known.to_error()

    def _handles_in(self, thread: int) -> bool:
        found: Any = sys._current_exceptions().get(thread)
        error = found[1] if isinstance(found, tuple) else found  # a tuple before Python 3.12
        for failure in _handled_with(error):
            if isinstance(failure, _OWN_END) and time.monotonic() < self._heard_at + GRACE:
                return True
            if isinstance(failure, DdpkitError) and failure._made > self._began:
                is_new = time.monotonic() < failure._made + GRACE
                return is_new or not _is_leaving(failure, sys._current_frames().get(thread))
        return False


def _handled_with(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception, the members of a group, and the exceptions being handled when it was raised.

    Not its causes: a script may name one long after handling it.
    """
    seen: set[int] = set()
    waiting = [error]
    while waiting:
        error = waiting.pop(0)
        if error is not None and id(error) not in seen:
            seen.add(id(error))
            yield error
            waiting += [*getattr(error, "exceptions", ()), error.__context__]


def _is_leaving(failure: BaseException, frame: FrameType | None) -> bool:
    """Return whether a failure is leaving one of Python's own blocks that waits, for example for threads."""
    trace = failure.__traceback__
    if trace is not None and trace.tb_frame.f_code.co_filename.startswith(_ASYNCIO):  # asyncio.run() closes its loop
        return True
    for each in _outwards(frame):
        code = each.f_code
        waits = code.co_name == "__exit__" and code.co_filename.startswith(_WAITING)
        if waits and any(argument is failure for argument in each.f_locals.values()):
            return True
    return False


def _random_below(seconds: float) -> float:
    return random.SystemRandom().uniform(0, seconds)  # leaves the script's generator alone


def _is_lost_in(frame: FrameType | None) -> bool:
    """Return whether an error raised here would be lost or do harm.

    Logging's handlers and `__del__` lose it, and code that already handles a failure has no use for it. An event loop
    interrupted in its own bookkeeping forgets a task, and then waits for it forever when it closes.
    """
    if frame is not None and frame.f_code.co_filename.startswith(_ASYNCIO):
        return True
    for each in _outwards(frame):
        code = each.f_code
        if code.co_filename == logging.__file__ or code.co_name == "__del__" or code in _uninterrupted:
            return True
    return False


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a thread's frames, the innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back
