"""Starts and ends the job in this process: the only code that makes or destroys a process group."""

from __future__ import annotations

import atexit
import logging
import multiprocessing.util
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from . import ranks
from .assembly import Context, Job, adopted_launch, assemble, checked_launch, close_stores, context_of, set_threads
from .connections import SETTLE, cut
from .devices import choose_device
from .errors import DdpkitError, LaunchError, NotSetUpError
from .failing import cause_of, fill_error_file, publish
from .store import Session, as_error

log = logging.getLogger(__name__)


_job: Job | None = None
_FORKED = "This process was forked from a rank and is none itself; start ranks with a launcher or ddpkit.spawn()."


def setup(
    *,
    backend: str | None = None,
    device: str | torch.device | None = None,
    timeout: timedelta = timedelta(minutes=10),
    num_threads: int | None = None,
    watch: bool = True,
) -> Context:
    """Joins the job that the environment describes, binds this rank's device and makes the process group. Collective.

    On one process it only chooses the device. A second call returns what the first made; a group that somebody else
    made is adopted, and left alone by `teardown()`.

    Args:
        backend: Backend of the process group, as torch names it; by default what suits the device: "gloo" on CPUs, for
            example "cpu:gloo,cuda:nccl" on GPUs.
        device: This rank's device. By default the accelerator whose index is the local rank, the only visible one, or
            the CPU where there is none. Ranks may share an accelerator only if they name it here.
        timeout: Bound on joining, on each later wait, and the group's time-out for collectives.
        num_threads: Threads of each rank's CPU operators. By default the launcher's choice (`OMP_NUM_THREADS`), else
            the cores that this rank may use divided among the ranks that share them.
        watch: Whether a thread learns of failures on other ranks while this one computes or sits in a collective.

    Returns:
        Where this process stands.

    Raises:
        LaunchError: If the environment's hints are incomplete or contradictory, the launch is nested, or the ranks do
            not fit together: on every rank that can be reached.
        ValueError: If an argument cannot be used.

    Example:
        >>> context = setup()
        >>> context.rank, context.world_size
        (0, 1)
        >>> teardown()
    """
    global _job
    if not isinstance(timeout, timedelta) or timeout <= timedelta(0):
        raise ValueError(f"timeout must be a positive datetime.timedelta, got {timeout!r}.")
    if num_threads is not None and (not isinstance(num_threads, int) or num_threads < 1):
        raise ValueError(f"num_threads must be a positive integer, got {num_threads!r}.")
    device = None if device is None else torch.device(device)
    if _job is not None and _job.session is not None and _job.session.pid != os.getpid():
        raise LaunchError(_FORKED)
    if _job is not None:
        if backend not in (None, _job.asked[0], _job.context.backend) or device not in (
            None,
            _job.asked[1],
            _job.context.device,
        ):
            raise ValueError(f"setup() was called before, with another backend or device:\n{_job.context}")
        return _job.context
    launch = adopted_launch() if dist.is_initialized() else checked_launch()
    job = Job(context_of(launch, torch.device("cpu")), (backend, device))
    try:
        if launch.world_size == 1 and launch.master_addr is None and not dist.is_initialized():
            job.context = context_of(launch, choose_device(device, 0, 1))
            set_threads(num_threads, 1, 1)
        else:
            assemble(job, launch, backend, device, timeout, num_threads, watch)
            job.former_hook, sys.excepthook = sys.excepthook, _excepthook
            atexit.register(teardown)
            multiprocessing.util.Finalize(None, _at_child_exit, exitpriority=100)
    except BaseException as error:
        _job = job
        cause = report(error)
        teardown()
        close_stores()
        if cause is not error:
            raise cause from error
        raise
    _job = job
    ranks.set_launch(job.launch or launch)
    if ranks.is_main_process():
        log.info("joined\n%s", job.context)
    return job.context


def teardown() -> None:
    """Leaves the job and destroys the group that `setup()` made; harmless when there is none. Runs at exit by itself.

    It waits for nobody, but rank 0 stays for at most 2 s if it hosts the store and others are still leaving.
    """
    global _job
    if _job is None:
        return
    if _job.session is not None:
        _job.session.handled = True  # nothing is raised in here
    job, _job = _job, None
    ranks.set_launch(None)
    if job.session is None or job.session.pid != os.getpid():
        return
    atexit.unregister(teardown)
    if sys.excepthook is _excepthook:
        sys.excepthook = job.former_hook
    failed = job.session.told is not None
    if failed:
        cut(job.session.connections, after=SETTLE)
        if not job.hosts_store:  # a DDP model may hold its port
            close_stores()
    if job.watch:
        job.watch.close()
    if job.owns_group and dist.is_initialized():  # before lingering: it frees ranks stuck with us
        if failed and "nccl" in str(job.context.backend):
            dist.distributed_c10d._abort_process_group()  # destroying would wait for operations that cannot end
        else:
            time.sleep(0.01)  # torch 2.6 destroys with the GIL, which gloo may need to drop a tensor
            dist.destroy_process_group()
        cut(job.session.connections)  # a DDP model holds the group until the process has ended
    job.session.leave(job.hosts_store)


def _at_child_exit() -> None:
    """What ends a rank that is a child of multiprocessing, where the interpreter's own hooks do not run."""
    if error := sys.exc_info()[1]:
        report(error)
    teardown()


@contextmanager
def distributed(**options: Any) -> Iterator[Context]:
    """`setup()` and `teardown()` around a block. Collective.

    When the block raises, the other ranks are told first, torchrun's error file is filled, and nothing waits for the
    group. When it raises because a peer failed, a `PeerError` that names the peer takes the place of the connection
    error.

    Args:
        **options: Those of `setup()`.

    Example:
        >>> with distributed() as context:
        ...     print(context.world_size)
        1
    """
    outermost = _job is None
    context = setup(**options)
    try:
        yield context
    except BaseException as error:
        cause = report(error) if outermost else error  # else the block around it may handle it
        if cause is not error:
            raise cause from error
        raise
    finally:
        if outermost:
            teardown()


def get_device() -> torch.device:
    """This rank's device: the one that `setup()` bound, before it the one that it would."""
    if _job is not None:
        return _job.context.device
    launch = ranks.current_launch()
    return choose_device(None, launch.local_rank or 0, launch.local_world_size or 1)


def joined() -> bool:
    """Whether there are peers to talk to. Adopts a group that somebody else made.

    Raises:
        NotSetUpError: If several processes were launched but not set up.
    """
    if _job is not None:
        if _job.session is not None and _job.session.pid != os.getpid():
            raise LaunchError(_FORKED)
        return _job.context.world_size > 1
    if dist.is_available() and dist.is_initialized():
        return setup(watch=False).world_size > 1
    if (world_size := ranks.get_world_size()) > 1:
        raise NotSetUpError(
            f"{world_size} processes were launched ({ranks.current_launch().kind}), but this one has not joined them. "
            "Call ddpkit.setup() first, or wrap main() in `with ddpkit.distributed():`."
        )
    return False


def current_session() -> Session:
    """The session of the joined job; call it only where `joined()` is true."""
    assert _job is not None and _job.session is not None
    return _job.session


def control_device() -> torch.device:
    """Where small control messages travel: the CPU if the group reaches it (gloo), else this rank's accelerator."""
    return (_job and _job.control) or torch.device("cpu")


@contextmanager
def peer_errors() -> Iterator[None]:
    """Around torch's collectives: a connection that broke because a peer failed becomes a `PeerError` that names it."""
    if _job and _job.session and _job.session.told:  # also if the error that said so was swallowed
        raise as_error(_job.session.told)
    try:
        yield
    except RuntimeError as error:
        if _job and _job.session and (cause := cause_of(error, _job.session)):
            raise cause from error
        raise


def report(error: BaseException) -> BaseException:
    """Tells the peers that this rank is failing; returns the error to show, which is a peer's if that was the cause."""
    try:
        return _report(error)
    except DdpkitError as heard:  # raised meanwhile by the watch, which does so once
        return _report(heard)


def _report(error: BaseException) -> BaseException:
    if isinstance(error, SystemExit) and not error.code:
        return error
    if _job is not None and _job.session is not None and _job.session.pid == os.getpid():
        error = cause_of(error, _job.session) or error
        publish(error, _job.session, _job.watch)
    fill_error_file(error)
    return error


def _excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    former = _job.former_hook if _job else sys.__excepthook__
    shown = report(error)
    if shown is not error:
        shown.__cause__ = error
        kind, trace = type(shown), shown.__traceback__
    former(kind, shown, trace)
