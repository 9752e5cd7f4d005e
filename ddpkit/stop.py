"""Stop all ranks at the same step when one of them gets a signal."""

from __future__ import annotations

import _thread
import atexit
import functools
import logging
import multiprocessing
import os
import signal
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
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
from .join.session import Session
from .launch import ranks
from .signals import handled_signals, handling
from .watch import stop_agreement
from .watch.links import is_below
from .watch.stop_agreement import StopAgreement, StopDecision, StopRequest

log = logging.getLogger(__name__)
_LATER = 10.0  # seconds that the others wait longer than rank 0, which knows and says whose answer is missing
_OF_SHELLS = 128  # is added to the number of a signal to make an exit code


@contextmanager
def stopping(
    signals: Iterable[int] = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1),
) -> Iterator[Stop]:
    """Let signals ask, in this block, that all ranks stop at the same step, instead of ending this process.

    A signal to any rank is enough. Call `now()` once a step, on every rank equally often; where it returns True, save
    and leave the loop. The ranks agree through the connections by which they hear of failures: a step costs no
    collective. Schedulers send such a signal some time before they end a job.

    A second Ctrl-C, 2 s after the first or later, ends the process at once. Once all ranks of a job have stopped, they
    stop at once in whatever block, until they leave the job.

    Args:
        signals: Numbers of the signals. By default those of schedulers and of Ctrl-C: SIGTERM, SIGINT, SIGUSR1. Their
            former handlers are put back at the block's end. Where a signal has stopped all ranks, such signals are
            passed over for another 30 s, since launchers signal ranks as soon as the first one has ended (Ctrl-C, 2 s).

    Raises:
        NotSetUpError: If there are several ranks without the watch, which `setup(watch=True)` starts.
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
        _has_peers()
    elif not handled_signals():  # else it is the outer block's
        stop_agreement.forget()
    stop = Stop()
    try:
        with handling(signals, _ask_for_signal) as block:
            try:
                yield stop
            finally:
                block.is_stopped = stop.signal > 0
        _say_what_came_too_late()
    finally:
        if not (current_job.has_job() or handled_signals()):  # or the next job would hear of it
            stop_agreement.forget()


class Stop:
    """The question whether all ranks stop now: see `stopping`.

    Example:
        >>> with stopping() as stop:
        ...     stop.ask("an hour is over")
        ...     print(stop.now(), stop.exit_code)
        True 0
    """

    def __init__(self) -> None:
        self._request: StopRequest | None = None  # by which all stop, once they do

    def now(self) -> bool:
        """Count a step, and return whether all ranks stop here: True on every rank at the same one, and from then on.

        It waits for nothing as long as no rank has asked. Then a rank may wait for the others' answers, once.

        Raises:
            BarrierTimeoutError: If a rank does not answer within the time-out of `setup()`.
            NotSetUpError: As `stopping`, where the job was joined in its block.
            PeerError: If a rank fails meanwhile.
        """
        several = _has_peers()
        agreement = stop_agreement.current()
        step, must_wait = agreement.next_step()
        if not several and agreement.request is not None:
            agreement.decision = agreement.decision or StopDecision(step, agreement.request)
        if several and must_wait and agreement.decision is None:
            _wait_for_decision(current_job.current_session(), agreement)
        decision = agreement.decision
        if decision is None or step < decision.step:
            return False
        if self._request is None:
            self._request = decision.request
            if ranks.is_main_process():
                log.warning("all ranks stop after this step: %s", self._request)
        return True

    def ask(self, reason: str) -> None:
        """Ask that all ranks stop, as a signal to this rank does; for example because its time is up.

        One rank is enough, and none waits.

        Args:
            reason: Why, for the log.
        """
        _ask(str(reason))

    @property
    def reason(self) -> str | None:
        """Why all ranks stop, as in "rank 1 (node2) got SIGTERM"; None as long as `now()` has not returned True."""
        return None if self._request is None else str(self._request)

    @property
    def exit_code(self) -> int:
        """The code for `sys.exit()` when the script has left the job, so that a scheduler sees that it is not done.

        It is 128 and the number of the signal, as shells count. It is 0 if no signal has stopped the ranks, and under
        torchrun, which would start them again after any other.
        """
        if self.signal == 0 or ranks.current_launch().kind == "torchrun":
            return 0
        return _OF_SHELLS + self.signal

    @property
    def signal(self) -> int:
        """The number of the signal that has stopped all ranks, 0 if none has."""
        return 0 if self._request is None else self._request.signal


def _has_peers() -> bool:
    """Return whether this rank is one of several; raise an error if these cannot agree."""
    if not lifecycle.joined():
        return False
    if not current_job.is_watched():
        raise NotSetUpError(
            "stopping() needs the connections of the watch, by which the ranks agree: call ddpkit.setup(watch=True), "
            "also where somebody else has made the process group."
        )
    return True


def _ask(reason: str, number: int = 0) -> None:
    """Ask for this rank that all stop; a signal handler may call it."""
    request = StopRequest(ranks.get_rank(), socket.gethostname(), reason, number)
    is_first = stop_agreement.ask(request)
    if is_first and not current_job.is_watched():  # else rank 0 says so
        _thread.start_new_thread(log.warning, ("%s", request.announcement()))


def _ask_for_signal(number: int) -> None:
    _ask(f"got {_name_of(number)}", number)


def _name_of(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # one of the real-time signals
        return f"signal {number}"


def _say_what_came_too_late() -> None:
    """Log a request after which no step was counted any more, whether or not the ranks have agreed on one."""
    agreement = stop_agreement.current()
    request = agreement.request
    if request is not None and not agreement.is_reached() and not handled_signals():
        log.warning("%s, but no step came after it in the block of stopping(): nothing was stopped.", request)


def _wait_for_decision(session: Session, agreement: StopAgreement) -> None:
    """Wait until rank 0 has said at which step all stop; or until it has left, or a rank that would pass it on."""

    def is_decided() -> bool | None:
        is_cut_off = any(is_below(session.rank, other) for other in session.failures.left)
        return agreement.decision is not None or is_cut_off or None

    def late() -> bool:
        missing = [0]
        if session.rank == 0:
            missing = agreement.missing(session.failures.left)
        named = [(rank, session.hosts[rank]) for rank in missing]
        words = ", ".join(f"rank {rank} ({host})" for rank, host in named)
        raise BarrierTimeoutError(
            f"The ranks did not agree at which step to stop within {session.timeout}: {words} gave no answer.",
            named,
            [],
        )

    timeout = session.timeout
    if session.rank > 0:
        timeout += timedelta(seconds=_LATER)
    with session.bounded(timeout):
        session.until(is_decided, timeout, late)


# A loader's workers live on when ranks are asked to stop.
#
# Such a signal often goes to workers, too: torchrun, Slurm and terminals send it to all processes of a rank. A worker
# that it ended would be an error in the loop, before all ranks have come to the step at which they stop.

_enduring: WeakSet[BaseProcess] = WeakSet()
os.register_at_fork(after_in_child=_enduring.clear)  # they are no children of a child


@contextmanager
def enduring_workers(of: DataLoader[Any]) -> Iterator[None]:
    """Let the workers that a loader starts in this block pass over what `stopping()` handles now, if it does.

    They end when the loader tells them to, or when this process is dead. Until they can pass over such signals these
    are blocked, which a process that is forked or spawned inherits; one that comes meanwhile is handled here when
    the block ends.
    """
    signals = handled_signals()
    if not signals or of.num_workers == 0:
        yield
        return
    before = set(multiprocessing.active_children())
    given = of.worker_init_fn
    of.worker_init_fn = functools.partial(_pass_over, signals, given)
    context: Any = of.multiprocessing_context or multiprocessing
    if context.get_start_method() != "fork":
        resource_tracker.ensure_running()  # which unblocks signals here when it starts
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        of.worker_init_fn = given
        for worker in set(multiprocessing.active_children()) - before:
            worker.terminate = worker.kill  # type: ignore[method-assign]  # torch calls it for one that is stuck
            _enduring.add(worker)


def _pass_over(signals: tuple[int, ...], given: Callable[[int], None] | None, worker_id: int) -> None:
    """Begin as a worker that passes over signals, and go on with the loader's own `worker_init_fn`."""
    for number in signals:
        signal.signal(number, _do_nothing)  # not SIG_IGN, which programs that the worker starts would inherit
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
    if given is not None:
        given(worker_id)


def _do_nothing(number: int, frame: FrameType | None) -> None:
    pass


@atexit.register
def _kill_the_rest() -> None:
    """End those that are left when this process ends, for Python would send them SIGTERM and wait."""
    alive = [worker for worker in _enduring if worker.is_alive()]
    if alive:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would raise
    for worker in alive:
        worker.kill()


loader.starting_workers = enduring_workers
