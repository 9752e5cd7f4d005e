"""Detect at once when a rank dies or fails, even while the others compute or wait in a collective.

Plain TCP connections form a tree of the ranks; they are silent as long as all is well. A rank that fails reports it
itself; for one that dies the kernel does, and a broken link is silent for 9 s. Every rank forwards a report to all but
its sender. A rank that receives a failure raises in its main thread; if that is impossible, it prints the failure and
the process ends. Heartbeats come from the kernels, not from processes: a thread cannot send one while a C call holds
the interpreter lock.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any

from ..errors import ERRORS_OF_ALL_RANKS, DdpkitError, LaunchError, MismatchError, describe_error
from ..job import current_job
from ..job.job import Job
from ..job.leaving import fill_error_file
from ..parsing import encode, parse
from ..rendezvous.failures import GRACE, Failure
from ..rendezvous.members import Members
from ..rendezvous.session import Session
from ..rendezvous.sockets import connect, cut
from ..rendezvous.store import call_with_timeout, try_store
from .connections import Connections, Event, send_exit_code
from .main_thread import MainThread
from .messages import (
    ANSWERS,
    Message,
    StatusReport,
    Steps,
    StopRequest,
    children_of,
    describe_main_thread,
    mask_stack_signal,
    parent_of,
    readable_stacks,
)
from .stop_agreement import StopAgreement

log = logging.getLogger(__name__)
_TICK = 1.0  # seconds between checks of the main thread's own wait, and of torchrun
_TICK_FAILED = 0.05  # the same once a rank has failed
# seconds in which a rank may raise by itself what another has raised
_IN_WAIT = 0.5  # in ddpkit's waits
_ELSEWHERE = 0.05  # elsewhere: torchrun's SIGTERM may come first
_TOGETHER = 3.0  # for an error that all ranks find, a busy one later
_OF_ALL = {kind.__name__ for kind in ERRORS_OF_ALL_RANKS}
_EXITING = 60.0  # seconds from a process's exit hooks to its end, before waiting ranks raise
_LOOK = 0.3  # seconds in which the store must report or record the fate of a lost rank
_LONG_WAIT = 30.0  # seconds in one collective after which rank 0 asks whether the others are in another
_LAST_WORDS, _LOG_WORDS = 2.0, 0.5  # seconds to send them
_TO_RANK_0 = ("activity", "wants_stop", "steps")  # fields of messages that the ranks between forward


class WatchThread(threading.Thread):
    """The thread through which this rank learns of failures.

    What each rank does about another:

    | event of a rank           | what each other rank does                                          |
    |---------------------------|--------------------------------------------------------------------|
    | its process is exiting    | wait up to 60 s for its exit code                                  |
    | its exit code             | 0: it has left; otherwise it has failed                            |
    | it has left               | raise if this rank waits for it                                    |
    | its connection closed     | it has failed, unless it left, or was exiting without an error     |
    | a failure                 | raise it in the main thread; if impossible, end the process        |

    Args:
        session: The job; its `failures` are kept up to date.
        token: Secret of this start of the job; strangers, who do not know it, are ignored.
        listener: Socket to which this rank's children connect, if it has some.

    Attributes:
        connections: Those of this rank.
        stop_agreement: What it knows of a stop of all ranks.
    """

    def __init__(self, session: Session, token: str, listener: socket.socket | None) -> None:
        super().__init__(name="ddpkit watch", daemon=True)
        self._session = session
        self._failures = session.failures
        warn = partial(_log, logging.WARNING)
        self.connections = Connections(session.rank, len(session.hosts), token, listener, warn)
        self._main_thread = MainThread(session, self.connections.wake)
        self._closing = False
        self._keeps = False  # whether the connections outlive the thread
        self._failure_sent = False  # whether this rank has reported a failure
        self._logged = False  # whether it has logged one
        self._report = StatusReport(len(session.hosts))
        self._wants_report = False
        self._has_answered = threading.Event()
        self._asks_after = _LONG_WAIT  # seconds after its last collective at which rank 0 asks what the others do
        self.stop_agreement = StopAgreement(len(session.hosts))
        _everywhere.add(self.connections)
        mask_stack_signal(signal.SIG_BLOCK)
        self.start()

    def wait_for_children(self, timeout: timedelta) -> None:
        """Wait until the ranks below this one are connected; from then on, the end of a connection is a failure."""
        rank = self._session.rank

        def late() -> LaunchError:
            absent = self.connections.absent()
            return LaunchError(f"Ranks {absent} did not connect to the watch of rank {rank} within {timeout}.")

        self._session.until(lambda: self.connections.is_full, timeout, late)

    def tell(self, failure: Failure) -> None:
        """Tell the other ranks that this one has failed."""
        self._failures.known = failure
        self._failures.muted = True
        self._tell_others(failure)
        self.connections.flush(_LAST_WORDS)

    def close(self, tells_code: bool = False) -> None:
        """Leave: from now on, the end of a connection is not a failure. First set `failures.muted`.

        Args:
            tells_code: Whether the process exits, and `detach()`, called last, lets it send its exit code.
        """
        if tells_code:
            self._keeps = True
            self.connections.post(encode(exiting=self._session.rank))
        else:
            failure = {"failure": self._failures.known} if self._failures.known else {}
            self.connections.announce(encode(left=self._session.rank, **failure))
        self._closing = True  # only now: the thread then closes all connections
        self.connections.wake()
        self.join(_LAST_WORDS)
        mask_stack_signal(signal.SIG_UNBLOCK)
        self._main_thread.close()

    def detach(self) -> None:
        """Let the exit of the process send its exit code: unless it is 0, this rank has failed."""
        if self._keeps and not self.is_alive():
            send_exit_code(self.connections.detach())

    def run(self) -> None:
        """Listen until the watch is closed; if that fails, so does the rank."""
        try:
            with readable_stacks():
                while not self._closing:
                    self._listen()
            self._show_report(at_once=True)
            if self._keeps:
                return
            for event in self.connections.shutdown(1.0):
                self._receive(event)
        except BaseException as error:
            if not self._closing:
                self._break_down(error)
        self.connections.close()

    def _listen(self) -> None:
        """Receive until the next check of this rank itself."""
        for event in self.connections.poll(self._pause()):
            self._receive(event)
        lost_peer = None if self._failures.known else self._failures.lost_peer()
        if lost_peer and self._failures.known is None:  # still
            self._failures.known = Failure.of(self._session.rank, lost_peer)
        if self._failures.known:
            self._tell_others(self._failures.known)  # the main thread may have found it in the store
        for rank, deadline in list(self._failures.exiting.items()):
            if time.monotonic() > deadline:
                self._on_departure(rank, rank)
        self._look_after_main_thread()
        self._suspect_deadlock()
        self._make_report()
        self._agree_to_stop()

    def _pause(self) -> float:
        if self._failures.known is None or self._failures.muted:
            return _TICK
        return min(_TICK_FAILED, max(0.0, self._main_thread.next_signal_at - time.monotonic()))

    # Events.

    def _receive(self, event: Event) -> None:
        if event.message is not None:
            self._on_message(event.message, event.rank)
        elif event.rank is not None:
            self._on_closed(event.rank, event.silent)

    def _on_message(self, message: Message, sender: int | None) -> None:
        if message.asks:
            self._on_question(sender)
        if message.failure is not None:  # before its sender's departure, which the main thread may be waiting for
            self._on_failure(message.failure, sender)
        if sender is None:  # not a rank: it reports that the job is wrong, or asks
            return
        if message.exiting is not None:
            self._on_exiting(message.exiting, sender)
        if message.code is not None:
            self._on_exit_code(sender, message.code)
        if message.left is not None:
            self._on_departure(message.left, sender)
        if message.asks_steps:
            self._ask_steps()
        if message.stop is not None:
            self._on_stop(message.stop)
        for name in _TO_RANK_0:
            self._send_to_rank_0(name, getattr(message, name))

    def _send_to_rank_0(self, name: str, value: Any) -> None:
        """Send or forward a field of a message, if it is there, to rank 0, or handle it there."""
        if value is None:
            return
        if self._session.rank > 0:
            self.connections.post_up(encode(**{name: value}))
        elif name == "steps":
            self.stop_agreement.counts[value.rank] = value.number
        elif name == "activity":
            self.connections.answer(encode(activity=value))
            self._report.add(value)
        elif not self.stop_agreement.is_asked:  # by an earlier request
            self.stop_agreement.first = value
            self._ask_steps()
            _log(logging.WARNING, value.announcement())

    def _on_exiting(self, rank: int, sender: int) -> None:
        self._failures.exiting[rank] = time.monotonic() + _EXITING
        self.connections.post(encode(exiting=rank), exclude=sender)

    def _on_exit_code(self, rank: int, code: int) -> None:
        if code == 0:
            self._on_departure(rank, rank)
        elif self._failures.known is None:
            words = f"it ended with exit code {code}, without teardown()"
            self._fail_for(self._failure_of(rank, "SystemExit", words))

    def _on_departure(self, rank: int, sender: int) -> None:
        if rank not in self._failures.left:
            self._failures.left.append(rank)
            self.connections.post(encode(left=rank), exclude=sender)
        self._failures.exiting.pop(rank, None)  # last: the main thread may be waiting for it

    def _on_closed(self, rank: int, silent: bool) -> None:
        if self._failures.known or self._closing:
            return
        if rank in self._failures.exiting:
            self._on_departure(rank, rank)
        if rank in self._failures.left:
            return
        reported = try_store(self._failures.look_up, _LOOK)  # its report may be lost, if it did not know this rank yet
        words = "its connection closed unexpectedly: the process was killed or crashed, or the network was cut"
        if silent:
            words = "its host stopped sending: the network was cut, or the machine stopped"
        self._fail_for(reported or self._failure_of(rank, "lost", words))

    def _on_failure(self, failure: Failure, sender: int | None = None) -> None:
        self._tell_others(failure, exclude=sender)  # first: the main thread may leave when it learns of it
        if self._failures.known is None:
            self._failures.known = failure

    def _fail_for(self, failure: Failure) -> None:
        """Record the failure of a rank that cannot report it any more."""
        self._on_failure(failure)
        self._failures.exiting.pop(failure.rank, None)
        top, below = sorted([self._session.rank, failure.rank])
        if parent_of(below) == top:  # a neighbour
            self._failures.announce(failure, patience=_LOOK)  # for ranks that join later, or are not yet connected

    def _failure_of(self, rank: int, kind: str, words: str) -> Failure:
        return Failure(rank, self._session.hosts[rank], kind, words, "")

    def _tell_others(self, failure: Failure, exclude: int | None = None) -> None:
        """Report the first failure to the other ranks, and no other."""
        if not self._failure_sent:
            self._failure_sent = True
            self.connections.announce(encode(failure=failure), exclude)

    # Reports of what the ranks are doing.

    def show_ranks(self) -> None:
        """Make rank 0 log what all ranks are doing after this rank waited too long; once in ten minutes."""
        is_due = self._session.rank == 0 or self._report.begin()  # of others, for the pause alone
        if is_due and self._failures.known is None:
            self._has_answered.clear()
            self._wants_report = True
            self.connections.wake()
            self._has_answered.wait(ANSWERS)  # until then this rank is still in its wait

    def _on_question(self, sender: int | None) -> None:
        """Forward the question what the ranks are doing; rank 0 answers one from below by a report in its log."""
        if sender is None or sender < self._session.rank:
            self._ask()
        else:
            self._wants_report = True

    def _ask(self) -> None:
        """Ask the ranks below this one, and answer for it."""
        self.connections.post_down(encode(asks=True))
        with self._harmless():
            self._send_to_rank_0("activity", describe_main_thread(self._session))
        if self._session.rank > 0:
            self._has_answered.set()

    def _suspect_deadlock(self) -> None:
        """If rank 0 has been in a collective for long, ask whether the ranks are in different ones."""
        seconds = time.monotonic() - self._session.acted_at
        if seconds < _LONG_WAIT:
            self._asks_after = _LONG_WAIT
        elif self._session.rank == 0 and seconds > self._asks_after and self._failures.known is None:
            self._asks_after = 2 * seconds
            with self._harmless():
                if describe_main_thread(self._session).is_in_collective and self._report.begin(is_suspected=True):
                    self._ask()

    def _make_report(self) -> None:
        """Ask for the wanted report, and log it."""
        if self._wants_report:
            self._wants_report = False
            if self._session.rank > 0:
                self.connections.post_up(encode(asks=True))
            elif self._report.begin():
                self._ask()
            else:
                self._has_answered.set()
        self._show_report()

    def _show_report(self, at_once: bool = False) -> None:
        """Log the report when it is complete, or at once."""
        with self._harmless():
            lines = self._report.take(at_once)
            if lines and self._session.rank == 0:
                _log(logging.ERROR, "\n".join(lines))
                self._has_answered.set()
            if self._report.deadlock and self._failures.known is None:
                self._on_failure(Failure.of(-1, MismatchError(self._report.deadlock)))

    # The step at which all stop.

    def _agree_to_stop(self) -> None:
        """Forward this rank's stop request; on rank 0 decide once all have answered."""
        agreement = self.stop_agreement
        if agreement.request is not None and not agreement.is_asked:
            self._send_to_rank_0("wants_stop", agreement.request)
        decision = agreement.decide(self._failures.left)
        if decision is not None:
            self._on_stop(decision)

    def _ask_steps(self) -> None:
        """Ask the ranks below this one for their number of steps, and answer for it."""
        self.connections.post_down(encode(asks_steps=True))
        self._send_to_rank_0("steps", Steps(self._session.rank, self.stop_agreement.answer()))

    def _on_stop(self, decision: StopRequest) -> None:
        self.connections.post_down(encode(stop=decision))
        self.stop_agreement.decision = decision  # only now: the main thread may leave when it sees it

    @contextmanager
    def _harmless(self) -> Iterator[None]:
        """Keep an error in a mere description from ending the rank."""
        try:
            yield
        except Exception as error:
            _log(logging.DEBUG, "Describing what the rank is doing failed", error)

    # The main thread.

    def _look_after_main_thread(self) -> None:
        """Make the main thread raise a failure, or end the process."""
        self._check_store()
        failure = self._failures.known
        if failure is None:
            return
        main_thread = self._main_thread
        if self._failures.muted or main_thread.has_ended():
            main_thread.stop_signals()
            return
        main_thread.signal_after(self._delay(failure))
        if self._failures.held or main_thread.handles_failure():
            main_thread.begin_again()
        elif main_thread.grace_is_over():
            self._kill_process(failure.to_error())
        elif time.monotonic() >= main_thread.next_signal_at:
            main_thread.send_signal()  # first: the log may be slow, and a launcher quick
            self._log_failure(failure)
        elif main_thread.ignores_signal():  # the rank that failed has closed them, if it lives
            cut(self._session.connections)
            if main_thread.waits_for_store():  # its host may be stopped
                cut(self._session.store_connections)

    def _check_store(self) -> None:
        """Detect that the store does not answer, if the main thread waits for it beyond its time-out."""
        deadline = self._session.deadline  # the main thread may clear it meanwhile
        if deadline is None or self._failures.known is not None:
            return
        if time.monotonic() > max([deadline, *self._failures.exiting.values()]) + GRACE:
            words = "the store, which it or torchrun hosts, does not answer: is the process stopped?"
            self._on_failure(self._failure_of(self._session.store_host, "silent", words))

    def _delay(self, failure: Failure) -> float:
        """Return the seconds in which this rank may find the other's error by itself."""
        if failure.type == "lost" or failure.rank < 0:
            return 0.0
        if failure.type in _OF_ALL:
            return _TOGETHER
        if self._session.deadline is None:
            return _ELSEWHERE
        return _IN_WAIT

    def _log_failure(self, failure: Failure) -> None:
        if not self._logged:
            self._logged = True
            headline = str(failure.to_error()).partition("\n")[0]  # the traceback follows when it is raised
            _log(logging.ERROR, headline)

    def _break_down(self, error: BaseException) -> None:
        """Tell all ranks that the watch of this one failed, and end this rank."""
        session = self._session
        words = f"its watch failed, so it cannot detect failures: {describe_error(error)}"
        failure = self._failure_of(session.rank, "unwatched", words)
        _log(logging.CRITICAL, f"Rank {session.rank} fails: {words}", error)
        with suppress(Exception):
            self._on_failure(failure)
            session.failures.announce(failure)
        while not self._closing:
            time.sleep(_TICK_FAILED)
            self._look_after_main_thread()

    def _kill_process(self, failure: DdpkitError) -> None:
        """End the process, whatever the main thread and its files are doing."""

        def say() -> None:
            words = f"Rank {self._session.rank} ends: its main thread {self._main_thread.reason()}. {failure}\n"
            with suppress(OSError):
                os.write(2, words.encode(errors="backslashreplace"))
            self._show_report(at_once=True)
            fill_error_file(failure)
            sys.stdout.flush()

        try:
            with suppress(Exception):
                call_with_timeout(say, _LAST_WORDS)  # the main thread may hold a lock of these files
            for child in multiprocessing.active_children():
                child.kill()
        finally:
            os._exit(1)


def _log(level: int, text: str, error: BaseException | None = None) -> None:
    """Log a text without waiting for those who hold the log: the main thread may hold it for good."""
    with suppress(Exception):
        call_with_timeout(lambda: log.log(level, "%s", text, exc_info=error), _LOG_WORDS)


_everywhere: weakref.WeakSet[Connections] = weakref.WeakSet()


def _close_in_child() -> None:
    """Close the connections in a forked child, so that they end with this process."""
    for connections in list(_everywhere):
        connections.close()


os.register_at_fork(after_in_child=_close_in_child)


# Connect the watches of all ranks into a tree as they join.

Listen = Callable[[], tuple[socket.socket, tuple[str, int]]]


def start_watch(job: Job, session: Session, members: Members, listener: socket.socket | None, listen: Listen) -> None:
    """Connect this rank to the ranks below it, then to the one above it.

    Args:
        job: The job; its watch is set once that runs, so that a failed connection can end it.
        session: Its session.
        members: Its ranks.
        listener: The socket where rank 0 already listens; None on others.
        listen: Opens one on a rank with ranks below it.
    """
    rank = session.rank
    timeout = job.asked.timeout
    with session.bounded(timeout):
        if rank > 0 and children_of(rank, members.world_size):
            listener, address = listen()
            session.store.set(f"watch/{rank}", json.dumps({"address": address}))
        job.watch = watch = WatchThread(session, members.token, listener)
        watch.wait_for_children(timeout)
        if rank > 0:
            watch.connections.connect(_connect_to_parent(session, members, timeout))
    session.watch = weakref.ref(watch)


def _connect_to_parent(session: Session, members: Members, timeout: timedelta) -> socket.socket:
    parent = parent_of(session.rank)

    def late() -> LaunchError:
        return LaunchError(f"Rank {parent} ({session.hosts[parent]}) did not open its watch within {timeout}.")

    address = members.watch_address
    if parent > 0 or address is None:
        key = f"watch/{parent}"
        session.wait_for_key(key, timeout, late)
        address = parse(session.store.get(key), key, {"address": tuple[str, int]})["address"]
    host, port = address
    try:
        return connect(host, port, timeout.total_seconds())
    except OSError as error:  # the connection may have ended because another rank failed
        raise session.find_cause(host=parent) or LaunchError(
            f"The watch cannot connect to rank {parent} at {host}:{port}: {error}. Open the ports between the nodes, "
            "which the process group needs, too, or turn off the watch: setup(watch=False)."
        ) from None


current_job.start_watch = start_watch
