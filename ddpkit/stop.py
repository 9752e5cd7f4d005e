"""Stop all ranks after the same step when one of them receives a signal."""

from __future__ import annotations

import _thread
import atexit
import functools
import logging
import math
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any
from weakref import WeakSet

import torch.distributed as dist
from torch.utils.data import DataLoader

from .data import loader
from .errors import BarrierTimeoutError, NotSetUpError
from .job import current_job, lifecycle
from .launch import ranks
from .rendezvous.session import Session
from .watch import stop_agreement
from .watch.messages import StopRequest, is_below
from .watch.stop_agreement import StopAgreement

log = logging.getLogger(__name__)
_LATER = 10.0  # seconds that the other ranks wait longer than rank 0, which names the missing ones
_OF_SHELLS = 128  # added to a signal's number to make an exit code


@contextmanager
def stopping(
    signals: Iterable[int] = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1),
) -> Iterator[Stop]:
    """Turn signals in this block into a request that all ranks stop after the same step.

    A signal to any rank is enough. Call `now()` once per step, equally often on every rank; if it returns True, save
    and leave the loop. The ranks agree through the watch's connections: a step costs no collective. Schedulers send
    such a signal some time before they end a job.

    A second Ctrl-C, 2 s after the first or later, ends the process at once. Once all ranks of a job have stopped, later
    blocks stop at once, too, until the ranks leave the job.

    Args:
        signals: Numbers of the signals; by default SIGTERM, SIGINT and SIGUSR1, which schedulers and Ctrl-C send. The
            former handlers are restored at the end of the block. After a signal has stopped all ranks, such signals are
            ignored for another 30 s (Ctrl-C for 2 s), because launchers signal ranks as soon as the first one exits.

    Raises:
        NotSetUpError: If there are several ranks without the watch; `setup(watch=True)` starts it.
        ValueError: If a signal cannot be handled, or this is not the main thread, where Python handles signals.

    Example:
        >>> with stopping() as stop:
        ...     for step in range(3):  # train, then
        ...         if stop.now():
        ...             break  # after saving
        >>> step
        2
    """
    if current_job.has_job() or dist.is_initialized():
        _enter_collective()
    elif not handled_signals():  # else the outer block's remain
        stop_agreement.forget()
    stop = Stop()
    try:
        with _handling(tuple(dict.fromkeys(signals)), stop):
            yield stop
        _warn_of_late_request()
    finally:
        if not (current_job.has_job() or handled_signals()):  # or the request would reach the next job
            stop_agreement.forget()


class Stop:
    """A request to stop all ranks; see `stopping`.

    Example:
        >>> with stopping() as stop:
        ...     stop.ask("an hour is over")
        ...     print(stop.now(), stop.exit_code)
        True 0
    """

    def __init__(self) -> None:
        self._request: StopRequest | None = None  # the request, once all ranks stop

    def now(self) -> bool:
        """Count a step; return True from the step on at which all ranks stop, the same on every rank.

        It waits only after a rank has asked to stop: once, for the other ranks' answers.

        Raises:
            BarrierTimeoutError: If a rank does not answer within the time-out of `setup()`.
            NotSetUpError: As for `stopping`, if the job was joined in the block.
            PeerError: If a rank fails meanwhile.
        """
        session = _enter_collective()
        agreement = stop_agreement.current()
        step, must_wait = agreement.next_step()
        if session is None and agreement.request is not None:
            agreement.decision = agreement.decision or replace(agreement.request, step=step)
        if session is not None and must_wait and agreement.decision is None:
            _wait_for_decision(session, agreement)
        decision = agreement.decision
        if decision is None or step < decision.step:
            return False
        if self._request is None:
            self._request = decision
            if ranks.is_main_process():
                log.warning("all ranks stop after this step: %s", self._request)
        return True

    def ask(self, reason: str) -> None:
        """Ask all ranks to stop, as a signal to this rank does, for example at a time limit.

        One rank is enough; the call does not wait.

        Args:
            reason: Reason, for the log.
        """
        _ask(str(reason))

    @property
    def reason(self) -> str | None:
        """Reason why all ranks stop, such as "rank 1 (node2) got SIGTERM"; None until `now()` returns True."""
        return None if self._request is None else str(self._request)

    @property
    def exit_code(self) -> int:
        """Exit code for `sys.exit()` after leaving the job; it tells a scheduler that the run is incomplete.

        128 plus the number of the signal, as in shells. 0 if no signal stopped the ranks, and under torchrun, which
        restarts ranks after any other code.
        """
        if self.signal == 0 or ranks.current_launch().kind == "torchrun":
            return 0
        return _OF_SHELLS + self.signal

    @property
    def signal(self) -> int:
        """Number of the signal that stopped all ranks; 0 if none did."""
        return 0 if self._request is None else self._request.signal


def _enter_collective() -> Session | None:
    """Return the session of a job whose ranks can agree, None without peers; raise if they cannot."""
    session = lifecycle.enter_collective()
    if session is not None and not current_job.is_watched():
        raise NotSetUpError(
            "stopping() needs the watch, through which the ranks agree: call ddpkit.setup(watch=True), "
            "even if other code has made the process group."
        )
    return session


def _ask(reason: str, number: int = 0) -> None:
    """Ask on behalf of this rank that all stop; safe in a signal handler."""
    request = StopRequest(ranks.get_rank(), socket.gethostname(), reason, number)
    is_first = stop_agreement.ask(request)
    if is_first and not current_job.is_watched():  # else rank 0 logs it
        _thread.start_new_thread(log.warning, ("%s", request.announcement()))


def _name_of(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # one of the real-time signals
        return f"signal {number}"


def _warn_of_late_request() -> None:
    """Log a request that came after the last counted step, whether or not the ranks agreed."""
    agreement = stop_agreement.current()
    request = agreement.request
    if request is not None and not agreement.is_reached() and not handled_signals():
        log.warning("%s, but now() was not called again in the block of stopping(): no rank was stopped.", request)


def _wait_for_decision(session: Session, agreement: StopAgreement) -> None:
    """Wait until rank 0 announces the step at which all stop, or until it or a rank between has left."""

    def is_decided() -> bool:
        is_cut_off = any(is_below(session.rank, other) for other in session.failures.left)
        return agreement.decision is not None or is_cut_off

    def late() -> BarrierTimeoutError:
        missing = [0]
        if session.rank == 0:
            missing = agreement.missing(session.failures.left)
        named = [(rank, session.hosts[rank]) for rank in missing]
        words = ", ".join(f"rank {rank} ({host})" for rank, host in named)
        return BarrierTimeoutError(
            f"The ranks did not agree at which step to stop within {session.timeout}: {words} gave no answer.",
            named,
            [],
        )

    timeout = session.timeout
    if session.rank > 0:
        timeout += timedelta(seconds=_LATER)
    with session.bounded(timeout):
        session.until(is_decided, timeout, late)


# Handle the signals that ask a process to stop.

_AGAIN = 2.0  # seconds in which another Ctrl-C counts as the same: torchrun forwards what ranks get from the terminal
_ENDING = 30.0  # seconds after a stop in which signals are ignored: srun ends ranks as soon as the first one exits


@dataclass
class _Process:
    """The state of signals in this process; only its main thread changes it."""

    blocks: list[tuple[int, ...]] = field(default_factory=list)  # signals of the active blocks
    former: dict[int, Any] = field(default_factory=dict)  # the handlers that ours replace, by signal
    pid: int = 0
    interrupted_at: float = -math.inf
    over_at: float = -math.inf  # when the last block ended


_process = _Process()


def handled_signals() -> set[int]:
    """Return the numbers of the handled signals."""
    return set().union(*_process.blocks)


@contextmanager
def _handling(signals: tuple[int, ...], stop: Stop) -> Iterator[None]:
    """Ask all ranks to stop at each signal that arrives in this block, instead of calling its former handler."""
    _process.pid = os.getpid()
    try:
        for number in signals:
            _take_over(number)
    except BaseException:
        put_back_unused()
        raise
    if not _process.blocks:
        _process.interrupted_at = -math.inf
    _process.blocks.append(signals)
    try:
        yield
    finally:
        _process.blocks.remove(signals)
        _process.over_at = time.monotonic()
        if not stop.signal:
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
    for number in _process.former.keys() - handled_signals():
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
    now = time.monotonic()
    if os.getpid() != _process.pid or number not in handled_signals():
        if _has_former_effect(number, now):
            _put_back(number)
            os.kill(os.getpid(), number)
    elif number != signal.SIGINT:
        _ask(f"got {_name_of(number)}", number)
    elif _process.interrupted_at == -math.inf:
        _process.interrupted_at = now
        _ask("got SIGINT", number)
    elif now > _process.interrupted_at + _AGAIN:  # not the same Ctrl-C
        signal.signal(number, signal.SIG_DFL)
        os.kill(_process.pid, number)


def _has_former_effect(number: int, now: float) -> bool:
    """Return whether the former handler gets a signal: in a forked child, such as a worker, or after a block."""
    if os.getpid() != _process.pid:
        return number == signal.SIGTERM  # for others it ends as its rank does
    ignored = _AGAIN if number == signal.SIGINT else _ENDING
    return now > _process.over_at + ignored


# Keep a loader's workers alive when ranks are asked to stop.
#
# Such signals often reach workers, too: torchrun, Slurm and terminals signal all processes of a rank. A worker that
# ends would raise in the loop before all ranks have reached the step at which they stop.

_protected: WeakSet[BaseProcess] = WeakSet()
os.register_at_fork(after_in_child=_protected.clear)  # a child has no workers of its own


@contextmanager
def enduring_workers(of: DataLoader[Any]) -> Iterator[None]:
    """Let workers that a loader starts in this block ignore the signals that `stopping()` handles, if it does.

    They end when the loader ends them, or when this process dies. Until a worker can ignore the signals, they are
    blocked, which forked and spawned processes inherit; a signal that arrives meanwhile is handled here at the end of
    the block.
    """
    signals = handled_signals()
    if not signals or of.num_workers == 0:
        yield
        return
    before = set(multiprocessing.active_children())
    given = of.worker_init_fn
    of.worker_init_fn = functools.partial(_ignore_in_worker, signals, given)
    context: Any = of.multiprocessing_context or multiprocessing
    if context.get_start_method() != "fork":
        resource_tracker.ensure_running()  # starting it later would unblock signals here
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        of.worker_init_fn = given
        for worker in set(multiprocessing.active_children()) - before:
            worker.terminate = worker.kill  # type: ignore[method-assign]  # torch calls it for one that is stuck
            _protected.add(worker)


def _ignore_in_worker(signals: set[int], given: Callable[[int], None] | None, worker_id: int) -> None:
    """Start as a worker that ignores signals, then run the loader's own `worker_init_fn`."""
    for number in signals:
        signal.signal(number, _do_nothing)  # not SIG_IGN, which programs started by the worker would inherit
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
    if given is not None:
        given(worker_id)


def _do_nothing(number: int, frame: FrameType | None) -> None:
    pass


@atexit.register
def _kill_the_rest() -> None:
    """End remaining workers when this process ends: Python would send them SIGTERM and wait."""
    alive = [worker for worker in _protected if worker.is_alive()]
    if alive:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would raise
    for worker in alive:
        worker.kill()


loader.starting_workers = enduring_workers
