"""Start and end the job in this process: `setup()`, `teardown()` and `distributed()`."""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import logging
import multiprocessing.util
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from importlib import import_module
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from ..arguments import suggest_option
from ..errors import DdpkitError, LaunchError, NotSetUpError, is_ours, report_of
from ..launch import ranks
from ..launch.launch import Launch
from ..launch.process_tree import Lost, find_agent, unnested_launch
from ..torch_internals import groups, in_autograd_thread, torch_is_before
from . import current_job
from .device import bind_device, choose_device, is_same_device
from .job import ChooseDevice, Context, Job, OpenStore, Options, check_launch, context_of
from .leaving import destroy_group, ended_well, fill_error_file, last_error, publish

if TYPE_CHECKING:
    from ..rendezvous.session import Session

log = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")

_hooks_left: tuple[Any, Any] | None = None  # an exception hook that is still installed, and the one before it
_leaving: Job | None = None  # the job that this process is leaving, whose group no thread may adopt
_forbidden_by = ""  # the caller of the current block without communication, if any
_callers = threading.Lock()  # held while the thread that calls a job's collectives is chosen
_OLDEST_TORCH = "2.6"  # the first with torch.accelerator; also in pyproject.toml
_FORKED = "This process was forked from a rank and is not one itself; start ranks with a launcher or ddpkit.spawn()."


def _shown_cause_first(fn: Callable[P, T]) -> Callable[P, T]:
    """Show an error that ends the script before it has a job like those of a job, to torchrun, too."""

    @functools.wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        global _hooks_left
        try:
            return fn(*args, **kwargs)
        except Exception:
            if current_job.job is None and sys.excepthook is sys.__excepthook__:
                _hooks_left = _excepthook_without_job, sys.excepthook
                sys.excepthook = _excepthook_without_job
            raise

    return call


@_shown_cause_first
def setup(
    *,
    backend: str | None = None,
    device: str | torch.device | ChooseDevice | None = None,
    timeout: timedelta = timedelta(minutes=10),
    num_threads: int | None = None,
    watch: bool = True,
    launch: Launch | None = None,
) -> Context:
    """Join the job that the environment describes, bind this rank's device and create the process group. Collective.

    On one process it only chooses the device. A second call returns the same result. If a process group already exists,
    `setup` adopts it, and `teardown()` does not destroy it.

    Args:
        backend: Backend of the process group, as torch names it; by default chosen for the device: "gloo" on CPUs, for
            example "cpu:gloo,cuda:nccl" on GPUs.
        device: This rank's device. By default the accelerator whose index is the local rank, the only visible one, or
            the CPU without accelerators. Ranks share an accelerator only if you pass it. A function is called with the
            local rank; if the launcher does not set that, after joining. torch's default device
            (`torch.set_default_device`) is neither used nor changed.
        timeout: Time-out of joining, of each later wait, and of the group's collectives.
        num_threads: CPU threads per rank. By default the launcher's choice (`OMP_NUM_THREADS`), else the cores
            available to this rank divided among the ranks that share them.
        watch: Whether to start the watch: a thread that reports other ranks' failures while this one computes or waits.
        launch: This process's place in the job, if the environment does not define it: `Launch("platform", rank,
            world_size, master_addr=..., master_port=...)`.

    Returns:
        This process's place in the job.

    Raises:
        LaunchError: If the environment is incomplete or contradictory, launchers are nested, or the ranks disagree or
            do not all join; on every reachable rank.
        TypeError: If an argument is of a wrong type.
        ValueError: If an argument is invalid.

    Example:
        >>> context = setup()
        >>> context.rank, context.world_size
        (0, 1)
        >>> teardown()
    """
    check_launch(launch)
    try:
        asked = Options(backend, device, timeout, num_threads, watch, launch)
    except (TypeError, ValueError) as error:
        if current_job.job is None and not dist.is_initialized():
            import_module(".joining", __package__).tell_peers(error, launch)
        raise
    job = current_job.job
    if job is None or not job.is_current():
        return _begin(asked).context
    if job.session is not None and not job.session.is_own:
        raise LaunchError(_FORKED)
    if asked.backend not in (None, job.asked.backend, job.context.backend):
        raise ValueError(f"setup() was called before, with another backend:\n{job.context}")
    device, local_rank = job.context.device, job.context.local_rank
    if asked.device and asked.device != job.asked.device and not is_same_device(asked.device, device, local_rank):
        raise ValueError(f"setup() was called before, with another device:\n{job.context}")
    _check_place(launch, job.launch)
    return job.context


def leave_to_rejoin() -> None:
    """Leave a job that lost ranks, without waiting for others: the caller keeps its store open for them."""
    _leave(lingers=False)


def rejoin(asked: Options, store: dist.Store, rank: int, world_size: int, store_host: int, lost: Lost) -> Context:
    """Join the job of the remaining ranks after a loss. Collective among these.

    Args:
        asked: The arguments of the earlier `setup()`.
        store: Where they meet.
        rank: This process's new rank.
        world_size: Their number.
        store_host: The rank that hosts the store.
        lost: Returns which of them has ended during the join, "" if none has.
    """
    launch = Launch("platform", rank, world_size)
    return _begin(replace(asked, launch=launch), OpenStore(store, host=store_host), lost).context


def _check_place(said: Launch | None, found: Launch) -> None:
    """Raise for a place that is not that of the joined job, or of the existing group."""
    if said is not None and (said.rank, said.world_size) != (found.rank, found.world_size):
        raise ValueError(
            f"This process is already rank {found.rank} of {found.world_size}, but setup() was passed rank {said.rank} "
            f"of {said.world_size}."
        )


def _begin(asked: Options, opened: OpenStore | None = None, lost: Lost = str) -> Job:
    """Join the current job, and leave the one before it, whose group no longer exists.

    Args:
        asked: The arguments of `setup()`.
        opened: The store of the job, if it is already open.
        lost: Returns the fate of a process that this one needs in order to join, "" while all live.
    """
    _leave()
    _remove_hook_left()
    if dist.is_initialized():
        launch = ranks.launch_of_group()
        _check_place(asked.launch, launch)
    else:
        launch = checked_launch(asked)
    job = Job(launch, asked, context_of(launch, torch.device("cpu")), lost, first_hook=sys.excepthook)
    try:
        if launch.world_size == 1 and launch.master_addr is None and not dist.is_initialized():
            device = choose_device(asked.device, 0, 1)
            bind_device(device)
            job.context = context_of(launch, device)
            job.set_threads(1, 1)
        else:
            _let_children_keep_groups()
            joining = import_module(".joining", __package__)
            if asked.watch:  # imported before the ranks meet, because they need it then
                current_job.load_watch()
            joining.assemble(job, opened)
            _install_hooks(job)
    except BaseException as error:
        current_job.job = job
        cause = report(error) if _is_failure(error) else error
        _leave()
        current_job.open_stores.clear()
        try:
            if cause is not error:
                raise cause from error
            raise
        finally:
            del cause  # breaks a reference cycle of it, its traceback and this frame, which would keep the store
    current_job.job = job
    ranks.set_launch(job.launch)
    for hook in current_job.on_join:
        hook()
    if ranks.is_main_process():
        log.info("joined\n%s", job.context)
    return job


def check_torch(version: str = torch.__version__) -> None:
    """Raise if torch is too old: vendors' builds often bypass pip's own check."""
    if torch_is_before(_OLDEST_TORCH, version):
        raise LaunchError(f"ddpkit needs torch {_OLDEST_TORCH} or newer, found {version}.")


def checked_launch(asked: Options) -> Launch:
    """Return the launch of the caller or the environment; if it is invalid, tell peers that may wait."""
    launch, warning = asked.launch, ""
    try:
        check_torch()
        if launch is None:
            launch, warning = unnested_launch()
    except LaunchError as error:
        import_module(".joining", __package__).tell_peers(error, launch)
        raise
    if warning:
        log.warning("%s", warning)
    return launch


@functools.cache
def _let_children_keep_groups() -> None:
    """Prevent forked children, such as a loader's workers, from destroying the process groups of this process.

    Destroying a group waits for gloo's threads, which a child does not have. It happens when a group in a reference
    cycle is collected, and when a child ends by `sys.exit`.
    """
    os.register_at_fork(after_in_child=_keep_groups)


def _keep_groups() -> None:
    gc.freeze()
    for group in groups():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))  # never released


def _install_hooks(job: Job) -> None:
    """Register the hooks that tell the other ranks how this process exits."""
    job.former_hook = sys.excepthook
    sys.excepthook = _excepthook
    job.former_error = id(last_error())
    atexit.register(_at_exit)
    job.finalizer = multiprocessing.util.Finalize(None, _at_child_exit, exitpriority=100)


def teardown() -> None:
    """Leave the job, if any, and destroy the group that `setup()` created. Runs automatically at exit.

    It does not wait for other ranks, except that the store's host waits up to 2 s for ranks that are leaving. After a
    failure, or if the store does not answer, it may take a few seconds.

    In an `except` or `finally` block it reports the exception to all ranks at once, like an exception that leaves the
    block of `distributed()`. A `KeyboardInterrupt` and an exit with code 0 are not failures.

    Raises:
        PeerError: After leaving, if a second thread called a collective, and the `DdpkitError` ended only that thread.

    Example:
        >>> context = setup()
        >>> teardown()
    """
    error = sys.exc_info()[1]
    job = current_job.job
    if isinstance(error, (Exception, SystemExit)):
        report(error)
    _leave()
    if error is None:
        _raise_if_refused(job)


def _raise_if_refused(job: Job | None) -> None:
    """Raise in the main thread the error that ended only another thread."""
    if job is not None and job.session is not None and job.refused:
        job.session.failures.raise_if_known()


def _leave(at_exit: bool = False, lingers: bool = True) -> None:
    """Leave the job.

    Args:
        at_exit: Whether the process is exiting; its exit code then tells whether this rank failed.
        lingers: Whether the store's host waits for ranks that still need it.
    """
    global _leaving
    job = current_job.job
    session = None
    if job is not None:
        for hook in current_job.on_leave:
            hook()
        job.undo_changes()
        session = job.own_session()
    if session is not None:
        session.failures.muted = True  # nothing is raised in here
        _leaving = job
    current_job.job = None
    ranks.set_launch(None)
    try:
        if job is not None and session is not None:
            _shut_down(job, session, at_exit, lingers)
    finally:
        _leaving = None


def _shut_down(job: Job, session: Session, at_exit: bool, lingers: bool) -> None:
    """Leave a job of several ranks, which this process shows no more."""
    _put_hook_back(job)
    atexit.unregister(_at_exit)
    if job.finalizer:
        job.finalizer.cancel()
    failed = session.failures.known is not None
    if failed:
        session.cut_connections(flush=True)
        if not job.hosts_store:  # a DDP model may hold its port
            current_job.open_stores.clear()
    if job.watch:
        job.watch.close(tells_code=at_exit and not failed)
    destroy_group(job, session)  # before lingering: it frees ranks that wait for this one
    session.leave(lingers and job.hosts_store)
    if job.watch and at_exit:
        job.watch.detach()


def _put_hook_back(job: Job) -> None:
    """Restore the script's exception hook; torch's, which names the rank, if the process may exit now."""
    global _hooks_left
    if sys.excepthook is not _excepthook:
        return
    sys.excepthook = job.first_hook
    if sys.exc_info()[1] is not None:
        sys.excepthook = _hook_that_shows(job)
        _hooks_left = sys.excepthook, job.first_hook


def _at_exit() -> None:
    """Leave when the interpreter ends."""
    job = current_job.job
    if job is None or job.own_session() is None:
        return
    error = last_error()
    if error is not None and id(error) != job.former_error:  # uncaught, and shown by another hook
        report(error)
    _leave(at_exit=True)


def _remove_hook_left() -> None:
    """Restore the script's exception hook if torch's is still installed, because this process continues."""
    global _hooks_left
    if _hooks_left is not None and sys.excepthook is _hooks_left[0]:
        sys.excepthook = _hooks_left[1]
    _hooks_left = None


def _at_child_exit() -> None:
    """Leave at the end of a multiprocessing child, where the interpreter's own hooks do not run."""
    if error := sys.exc_info()[1]:
        report(error)
    _leave()


@_shown_cause_first
@contextmanager
def distributed(
    *,
    backend: str | None = None,
    device: str | torch.device | ChooseDevice | None = None,
    timeout: timedelta = timedelta(minutes=10),
    num_threads: int | None = None,
    watch: bool = True,
    launch: Launch | None = None,
) -> Iterator[Context]:
    """Run a block between `setup()` and `teardown()`; takes the arguments of `setup()`. Collective.

    The end of the block waits for checkpoints of `save(wait=False)`, and raises their errors on every rank. If the
    block raises, `distributed` reports the exception to the other ranks and in torchrun's error file, and does not
    wait. If a failed peer broke a collective in it, a `PeerError` that names the peer replaces the connection error.

    Example:
        >>> with distributed() as context:
        ...     print(context.world_size)
        1
    """
    outer = current_job.job
    outermost = outer is None or not outer.is_current()
    context = setup(
        backend=backend, device=device, timeout=timeout, num_threads=num_threads, watch=watch, launch=launch
    )
    try:
        yield context
        if outermost:
            current_job.finish()
            _raise_if_refused(current_job.job)
    except BaseException as error:
        cause = report(error) if outermost else error  # else the outer block may handle it
        if cause is not error:
            raise cause.with_traceback(error.__traceback__) from error
        raise
    finally:
        if outermost:
            _leave()


def enter_collective() -> Session | None:
    """Make sure that this thread may call a collective now. Adopts an existing process group, collectively.

    Returns:
        The session of the job; None without peers.

    Raises:
        DdpkitError: In a block without communication; in a second thread.
        NotSetUpError: If several processes were launched but not set up, or their group was destroyed or replaced.
    """
    if _forbidden_by:
        raise DdpkitError(
            f"Collectives cannot run inside a block of {_forbidden_by}: the others would wait for a rank that "
            "raises there. Call them before or after the block."
        )
    job = current_job.job
    if job is None or not job.is_current():
        job = _join_group()
    session = None if job is None else job.session
    if job is None or session is None:
        return None
    if not session.is_own:
        raise LaunchError(_FORKED)
    if job.context.world_size == 1:
        return None
    session.acted_at = time.monotonic()
    if threading.current_thread() is not job.caller:
        _check_thread(job, threading.current_thread())
    return session


def _check_thread(job: Job, thread: threading.Thread) -> None:
    """Raise in a second thread, whose collectives would meet in arbitrary order; make all ranks fail.

    A thread may continue after the previous one has ended. A backward runs hooks in the engine's own threads, which
    Python did not start, and waits for them.
    """
    session = current_job.current_session()
    if job.refused:
        session.failures.raise_if_known()
    with _callers:
        first = job.caller
        if first is None or not first.is_alive():
            job.caller = thread
            return
    if in_autograd_thread():
        return
    error = DdpkitError(
        f"Thread {thread.name!r} calls a collective, but thread {first.name!r} called one before; from two threads, "
        "their order may differ between ranks. Call all collectives, including wrap_model(), in one thread."
    )
    failure = session.failure_of(error)
    if session.failures.known is None:
        session.failures.known = failure
        if job.watch:
            job.watch.connections.wake()
    job.refused = True
    job.caller = None  # so that no thread calls one any more
    session.failures.announce(failure)
    raise error


@contextmanager
def no_collectives(call: str) -> Iterator[None]:
    """Forbid ddpkit's communication in a block in which one rank may raise alone; blocks cannot be nested."""
    global _forbidden_by
    enter_collective()
    _forbidden_by = call
    try:
        yield
    finally:
        _forbidden_by = ""


@_shown_cause_first
def _join_group() -> Job | None:
    """Adopt a group that existed before any job; return None on one process without a group."""
    former = current_job.job
    if former is not None:
        size = former.context.world_size
        raise NotSetUpError(
            f"The process group of this job, of {size} ranks, was destroyed or replaced. Call ddpkit.teardown() at the "
            "end of the job, instead of dist.destroy_process_group(); to continue, call ddpkit.setup() again on all "
            "ranks, or on all of the new group."
        )
    if _leaving is not None and _leaving.is_current():
        raise NotSetUpError("This process is leaving its job in another thread, so it can call no more collectives.")
    if dist.is_initialized():
        job = _begin(Options(watch=False))
        if ranks.is_main_process():
            advice = "to report failures to other ranks at once, call ddpkit.setup() on every rank"
            log.info("adopted an existing process group, without a watch: %s", advice)
        return job
    world_size = ranks.get_world_size()
    if world_size > 1:
        raise NotSetUpError(
            f"{world_size} processes were launched ({ranks.current_launch().kind}), but this one has not joined them. "
            "Call ddpkit.setup() first, or wrap main() in `with ddpkit.distributed():`."
        )
    return None


def exchange(text: str, subset: tuple[int, ...] | None = None) -> list[str]:
    """Give every rank the texts of all, or of these ranks, through the store; `[text]` on one process. Collective."""
    session = enter_collective()
    return session.exchange(text, ranks=subset) if session else [text]


def report(error: BaseException) -> BaseException:
    """Tell the peers that this rank is failing; return the error to show, a peer's if that was the cause."""
    try:
        return _report(error)
    except DdpkitError as heard:  # raised meanwhile by the watch, which raises only once
        return _report(heard if isinstance(error, Exception) else error)


def _report(error: BaseException) -> BaseException:
    if ended_well(error):
        return error
    with suppress(Exception):  # the script's exceptions do anything
        suggest_option(error)
    job = current_job.job
    session = None if job is None else job.own_session()
    if job is not None and session is not None:
        error = session.explain(error, session) or error
        publish(error, session, job.watch)
    agent = None if job is not None else find_agent(os.environ, os.getpid())
    is_rank = agent is None or agent.pid == os.getppid()  # and no program of one, which shares the rank's file
    if is_rank and _is_failure(error):
        fill_error_file(error)
    return error


def _is_failure(error: BaseException) -> bool:
    """Return whether an error ends the job, and not only a process beside it."""
    return not isinstance(error, LaunchError) or error.is_failure


def _excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    _report_and_show(_hook_that_shows(current_job.job), error, trace)


def _excepthook_without_job(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    _report_and_show(_hook_that_shows(None), error, trace)  # a job's hook may lead here


def _report_and_show(hook: Any, error: BaseException, trace: TracebackType | None) -> None:
    shown = report(error)
    if shown is not error:
        shown.__cause__ = error
        shown = shown.with_traceback(trace)
    hook(type(shown), shown, trace)


def _hook_that_shows(job: Job | None) -> Any:
    """Return an exception hook that shows ddpkit's errors with their cause first, unless the script has its own."""
    former, prefix = sys.__excepthook__, ""
    if job is not None:
        former, prefix = job.former_hook, f"[rank{job.launch.rank}]: "
        if job.first_hook is not sys.__excepthook__ and job.first_hook.__module__ != dist.distributed_c10d.__name__:
            return former

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not is_ours(error):
            former(kind, error, trace)
            return
        sys.stderr.write("".join(prefix + line for line in report_of(error).splitlines(keepends=True)))
        sys.stderr.flush()

    return show
