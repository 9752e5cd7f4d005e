"""Notices at once when a rank dies or fails, also while the others compute or sit in a collective.

Every rank holds one plain TCP connection to rank 0, silent while all is well. A rank that fails says so on it; for one
that dies the kernel does (keep-alive finds a cut link in about 9 s). Rank 0 passes the news on. A rank that hears it
raises in its main thread; if that is stuck in a C call, the verdict is printed and the process ends. There is no
heartbeat: a thread cannot send one while a C call holds the interpreter lock.
"""

from __future__ import annotations

import contextlib
import json
import logging
import multiprocessing
import os
import random
import selectors
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from types import FrameType
from typing import Any

from .connections import SETTLE, cut, keep_alive
from .errors import BarrierTimeout, CheckpointError, DdpkitError, LaunchError, MismatchError, PeerError, ReplicaMismatch
from .store import Session, as_error, failure_record

log = logging.getLogger(__name__)
_TICK = 1.0  # seconds between looks at the main thread's own wait, and at torchrun
# seconds in which a rank may raise by itself what another has raised: in our waits; elsewhere, where torchrun's SIGTERM
# may come first; and an error that all ranks find together, which a busy one finds later
_IN_WAIT, _ELSEWHERE, _TOGETHER = 0.5, 0.05, 3.0
_OF_ALL = {kind.__name__ for kind in (BarrierTimeout, CheckpointError, MismatchError, ReplicaMismatch)}
_GRACE = 5.0  # seconds that the main thread gets to raise when it is told to, or by itself when its time is up
_AGAIN = 0.03  # seconds, at most, until the next try, where what is raised would get lost
_NEVER = float("inf")
_STRANGER = 100_000  # bytes without a newline that are taken from whoever has not said who it is


class Watch(threading.Thread):
    """This rank's end of the watch: on rank 0 the listener that all connect to, elsewhere a connection to it.

    Args:
        session: Whose `told` and `left` are kept up to date.
        token: A secret of this start of the job; other visitors are ignored.
        wire: Rank 0's listening socket; on the other ranks their connection to it.
        ending: Called with the verdict before the process is ended.
    """

    def __init__(
        self, session: Session, token: str, wire: socket.socket, ending: Callable[[DdpkitError], None]
    ) -> None:
        super().__init__(name="ddpkit watch", daemon=True)
        self._session, self._token, self._ending = session, token, ending
        self._hub = session.rank == 0
        self._peers: dict[int, socket.socket] = {}
        self._text: dict[socket.socket, bytes] = {}
        self._listener, self._closing = wire, False
        self._alarm_at = self._end_at = _NEVER
        self._lock = threading.Lock()  # both threads send
        self._full = threading.Event()  # set when all ranks hold their connections
        self._wake, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._selector.register(wire, selectors.EVENT_READ)
        if not self._hub:
            self._adopt(0, wire)
            self._send(0, {"token": token, "rank": session.rank})
        me = weakref.ref(self)  # a forked child would hold the connections open after our death
        os.register_at_fork(after_in_child=lambda: _forget(me()))
        self._armed = hasattr(signal, "SIGURG") and threading.current_thread() is threading.main_thread()
        if self._armed:  # nobody else sends SIGURG, and whoever does not handle it ignores it
            self._former = signal.signal(signal.SIGURG, self._raise_in_main)
        self.start()

    def wait(self, timeout: timedelta) -> None:
        """Waits on rank 0 until all ranks are connected: from then on, every end of a connection means something."""

        def late() -> bool:
            absent = [rank for rank in self._session.everyone if rank and rank not in self._peers]
            raise LaunchError(f"Ranks {absent} did not connect to the watch of rank 0 within {timeout}.")

        if self._hub and len(self._session.hosts) > 1:
            self._session.until(lambda: self._full.is_set() or None, timeout, late)

    def tell(self, failure: dict[str, Any]) -> None:
        """Tells the other ranks that this one has failed."""
        self._session.told, self._session.handled = failure, True
        self._spread({"failure": failure})

    def close(self) -> None:
        """Leaves in good order: after this, no end of a connection is a failure. First set the session's `handled`."""
        word = {"left": self._session.rank}
        self._spread(word | {"failure": self._session.told} if self._session.told else word)
        self._closing = True  # only now: the thread then parts from all connections
        with contextlib.suppress(OSError):  # the thread may have ended before
            self._wake.send(b"x")
        self.join(2.0)
        if self._armed and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGURG, self._former or signal.SIG_DFL)

    def run(self) -> None:
        """Listens until the watch is closed."""
        while not self._closing:
            pending = min(self._alarm_at, self._end_at) < _NEVER
            left = self._alarm_at - time.monotonic()
            for key, _ in self._selector.select(min(_ELSEWHERE, max(0.0, left)) if pending else _TICK):
                self._hear(key.fileobj)  # type: ignore[arg-type]
            if self._session.told is None and (orphan := self._session.orphan()):
                failure = failure_record(self._session.rank, orphan)
                self._spread({"failure": failure})
                self._learn(failure)
            self._look_after_main()
        self._part()

    def _hear(self, wire: socket.socket) -> None:
        if wire is self._woken:
            wire.recv(64)
        elif self._hub and wire is self._listener:
            visitor, _ = wire.accept()
            self._text[visitor] = b""
            self._selector.register(visitor, selectors.EVENT_READ)
        else:
            try:
                data = wire.recv(65536)
            except OSError:
                data = b""
            *lines, self._text[wire] = (self._text.get(wire, b"") + data).split(b"\n")
            for line in lines:
                self._obey(wire, line)
            if not data or (len(self._text[wire]) > _STRANGER and self._rank_of(wire) is None):
                self._lose(wire)

    def _obey(self, wire: socket.socket, line: bytes) -> None:
        rank = self._rank_of(wire)
        try:
            news = json.loads(line)
            if rank is None and news.pop("token") != self._token:
                return
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
            return  # somebody who knocked at the wrong door
        if "rank" in news:
            self._adopt(news["rank"], wire)
        if self._hub and "rank" not in news:
            self._spread(news, besides=wire)  # before our main thread hears it, for it may leave then
        if "left" in news:
            self._session.left.append(news["left"])
        if "failure" in news and self._session.told is None:
            self._learn(news["failure"])

    def _lose(self, wire: socket.socket) -> None:
        self._selector.unregister(wire)
        wire.close()
        self._text.pop(wire, None)
        rank = self._rank_of(wire)
        if rank is None:
            return
        del self._peers[rank]
        if rank in self._session.left or self._session.told or self._closing:
            return
        words = "its connection closed without a word: the process was killed or crashed, or the network was cut"
        failure = failure_record(rank, PeerError(rank, self._session.hosts[rank], "lost", words))
        if self._hub:
            self._spread({"failure": failure})
            self._session.announce(failure, patience=0.0)  # for those that come later
        self._learn(failure)

    def _learn(self, failure: dict[str, Any]) -> None:
        self._session.told = failure
        if self._closing or self._session.handled:
            return
        alone = _ELSEWHERE if self._session.deadline is None else _IN_WAIT
        courtesy = _TOGETHER if failure["type"] in _OF_ALL else alone
        self._alarm_at = time.monotonic() + (0 if failure["type"] == "lost" else courtesy)
        self._look_after_main()

    def _look_after_main(self) -> None:
        session, now = self._session, time.monotonic()
        deadline = session.deadline  # the main thread may clear it meanwhile
        if deadline is not None and now > deadline + _GRACE and session.told is None:
            words = "the store that it hosts, or its agent, does not answer: is the process stopped?"
            self._learn(failure_record(0, PeerError(0, session.hosts[0], "silent", words)))
        if session.handled or session.told is None:
            self._alarm_at = self._end_at = _NEVER
        elif now >= self._alarm_at:
            if self._end_at == _NEVER:
                self._end_at = now + _GRACE
                log.error("%s", str(as_error(session.told)).partition("\n")[0])  # its traceback comes when it is raised
            self._alarm_at = _NEVER
            if self._armed:
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGURG)
        elif now > self._end_at:
            self._end(as_error(session.told))
        elif now > self._end_at - _GRACE + 2 * SETTLE:  # the rank that failed has cut them, if it lives
            cut(session.connections)

    def _end(self, verdict: DdpkitError) -> None:
        why = (
            "is in a call that does not return"
            if self._armed
            else "did not call setup(), so nothing can be raised in it"
        )
        words = f"Rank {self._session.rank} ends: its main thread {why}. {verdict}\n"
        try:
            with contextlib.suppress(OSError):
                os.write(2, words.encode(errors="backslashreplace"))
            self._ending(verdict)
            sys.stdout.flush()
            for child in multiprocessing.active_children():
                child.kill()
        finally:
            os._exit(1)

    def _raise_in_main(self, signum: int, frame: FrameType | None) -> None:
        session = self._session
        if session.told is not None and not session.handled and os.getpid() == session.pid:
            if _swallows(frame):
                self._alarm_at = time.monotonic() + random.SystemRandom().uniform(0, _AGAIN)  # out of step with it
                self._wake.send(b"x")
                return
            session.handled = True
            raise as_error(session.told)
        if callable(self._former):
            self._former(signum, frame)

    def _rank_of(self, wire: socket.socket) -> int | None:
        return next((rank for rank, peer in self._peers.items() if peer is wire), None)

    def _adopt(self, rank: int, wire: socket.socket) -> None:
        wire.settimeout(2.0)
        keep_alive(wire)
        self._peers[rank] = wire
        if len(self._peers) == len(self._session.hosts) - 1:
            self._full.set()

    def _spread(self, news: dict[str, Any], besides: socket.socket | None = None) -> None:
        for rank, wire in list(self._peers.items()):
            if wire is not besides:
                self._send(rank, news)

    def _send(self, rank: int, news: dict[str, Any]) -> None:
        try:
            with self._lock:
                self._peers[rank].sendall(json.dumps(news).encode() + b"\n")
        except (OSError, KeyError):  # it has gone; its connection tells the rest
            pass

    def _part(self) -> None:
        """Reads what is still under way: closing over unread data would destroy our last words to the other side."""
        for wire in self._peers.values():
            try:
                wire.shutdown(socket.SHUT_WR)
            except OSError:
                pass
        end = time.monotonic() + 1.0
        while self._peers and (left := end - time.monotonic()) > 0:
            for key, _ in self._selector.select(left):
                self._hear(key.fileobj)  # type: ignore[arg-type]
        _forget(self)


def _swallows(frame: FrameType | None) -> bool:
    """Whether an exception that is raised here would get lost: in a handler of logging's, or a `__del__`."""
    while frame is not None:
        if frame.f_code.co_filename == logging.__file__ or frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False


def _forget(watch: Watch | None) -> None:
    """Closes this process's ends of all connections."""
    if watch is not None:
        for wire in (*watch._text, *watch._peers.values(), watch._listener, watch._wake, watch._woken):
            wire.close()
        watch._selector.close()
