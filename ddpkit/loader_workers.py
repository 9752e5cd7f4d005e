"""Keep a loader's workers alive through the signals by which ranks are asked to stop in good order.

Such a signal often goes to workers, too: torchrun, Slurm and terminals send it to all processes of a rank. A worker
that it ended would be an error in the loop, before all ranks have come to the step at which they stop.
"""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any
from weakref import WeakSet

from torch.utils.data import DataLoader

from .data import loader
from .signals import handled_signals

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
