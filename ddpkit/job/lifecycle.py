"""Starting and ending the job in this process: here begins and ends all that `ddpkit` does in a process."""

from __future__ import annotations

import atexit
import ctypes
import gc
import logging
import multiprocessing.util
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from importlib import import_module
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from ..errors import DdpkitError, LaunchError, NotSetUpError, report_of
from ..launch import ranks
from ..launch.launch import Launch
from ..launch.process_tree import unnested_launch
from ..torch_internals import groups, in_autograd_thread
from . import current_job
from .device import bind_device, choose_device, is_same_device
from .job import ChooseDevice, Context, Job, OpenStore, Options, check_launch, checked_options, context_of
from .leaving import destroy_group, ended_well, fill_error_file, last_error, publish

log = logging.getLogger(__name__)

_hooks_left: tuple[Any, Any] | None = None  # torch's exception hook, which has stayed, and the one from before
_apart = ""  # whose block this process is in, in which it exchanges nothing with other ranks
_children_keep_groups = False  # whether forked children are told to, which cannot be taken back
_callers = threading.Lock()  # held where the thread that calls a job's collectives is chosen
_OLDEST_TORCH = (2, 6)  # the first with torch.accelerator; also in pyproject.toml
_FORKED = "This process was forked from a rank and is none itself; start ranks with a launcher or ddpkit.spawn()."


def setup(
    *,
    backend: str | None = None,
    device: str | torch.device | ChooseDevice | None = None,
    timeout: timedelta = timedelta(minutes=10),
    num_threads: int | None = None,
    watch: bool = True,
    launch: Launch | None = None,
) -> Context:
    """Join the job that the environment describes, bind this rank's device and make the process group. Collective.

    On one process it only chooses the device. A second call returns what the first made; a group that somebody else
    made is adopted, and left alone by `teardown()`.

    Args:
        backend: Backend of the process group, as torch names it; by default what suits the device: "gloo" on CPUs, for
            example "cpu:gloo,cuda:nccl" on GPUs.
        device: This rank's device. By default the accelerator whose index is the local rank, the only visible one, or
            the CPU where there is none. Ranks may share an accelerator only if they name it here. A function is called
            with the local rank, which on some platforms is known only when the ranks have met. The default device of
            torch (`torch.set_default_device`) does not tell ranks apart: it is neither asked nor changed.
        timeout: Bound on joining, on each later wait, and the group's time-out for collectives.
        num_threads: Threads of each rank's CPU operators. By default the launcher's choice (`OMP_NUM_THREADS`), else
            the cores that this rank may use divided among the ranks that share them.
        watch: Whether a thread learns of failures on other ranks while this one computes or sits in a collective.
        launch: This process's place in the job, where the environment does not tell it: `Launch("platform", rank,
            world_size, master_addr=..., master_port=...)`.

    Returns:
        Where this process stands.

    Raises:
        LaunchError: If the environment's hints are incomplete or contradictory, the launch is nested, or the ranks do
            not fit together: on every rank that can be reached.
        TypeError: If an argument is of another type than it should be.
        ValueError: If an argument cannot be used.

    Example:
        >>> context = setup()
        >>> context.rank, context.world_size
        (0, 1)
        >>> teardown()
    """
    check_launch(launch)
    try:
        asked = checked_options(backend, device, timeout, num_threads, watch, launch)
    except (TypeError, ValueError) as error:
        if current_job.job is None and not dist.is_initialized():
            import_module(".refusal", __package__).tell_peers(error, launch)
        raise
    job = current_job.job
    if job is None or not job.is_current():
        return _begin(asked).context
    _refuse_forked(job)
    if asked.backend not in (None, job.asked.backend, job.context.backend):
        raise ValueError(f"setup() was called before, with another backend:\n{job.context}")
    device, local_rank = job.context.device, job.context.local_rank
    if asked.device and asked.device != job.asked.device and not is_same_device(asked.device, device, local_rank):
        raise ValueError(f"setup() was called before, with another device:\n{job.context}")
    _check_place(launch, job.launch)
    return job.context


def leave_to_rejoin() -> None:
    """Leave a job that has lost ranks, without waiting for others: the caller keeps its store open for them."""
    _leave(lingers=False)


def rejoin(
    asked: Options,
    store: dist.Store,
    rank: int,
    world_size: int,
    store_host: int,
    lost: Callable[[], str],
) -> Context:
    """Join the job of those who go on where others were lost. Collective among these.

    Args:
        asked: The arguments of the `setup()` before.
        store: Where they meet.
        rank: This process's number among them.
        world_size: Their number.
        store_host: The one of them that hosts the store.
        lost: Returns which of them has ended while they join, "" if none has.
    """
    launch = Launch("platform", rank, world_size)
    return _begin(replace(asked, launch=launch), OpenStore(store, host=store_host), lost).context


def _check_place(said: Launch | None, found: Launch) -> None:
    """Refuse a place that is not the one of the job which has been joined, or of the group that there is."""
    if said is not None and (said.rank, said.world_size) != (found.rank, found.world_size):
        raise ValueError(
            f"This process is rank {found.rank} of {found.world_size} already, but setup() was told rank {said.rank} "
            f"of {said.world_size}."
        )


def _refuse_forked(job: Job) -> None:
    if job.session is not None and not job.session.is_own:
        raise LaunchError(_FORKED)


def _begin(asked: Options, opened: OpenStore | None = None, lost: Callable[[], str] | None = None) -> Job:
    """Join the job that there is now, and leave the one before it, whose group has gone.

    Args:
        asked: The arguments of `setup()`.
        opened: The store of the job, if there is one already.
        lost: Returns what became of a process without which this one cannot join, "" while all live.
    """
    _leave()
    _remove_hook_left()
    if dist.is_initialized():
        launch = ranks.launch_of_group()
        _check_place(asked.launch, launch)
    else:
        launch = checked_launch(asked)
    job = Job(launch, asked, context_of(launch, torch.device("cpu")), first_hook=sys.excepthook)
    try:
        if launch.world_size == 1 and launch.master_addr is None and not dist.is_initialized():
            device = choose_device(asked.device, 0, 1)
            bind_device(device)
            job.context = context_of(launch, device)
            job.set_threads(1, 1)
        else:
            _let_children_keep_groups()
            joining = import_module(".joining", __package__)
            if asked.watch:  # before the ranks meet: what they need later must be there
                import_module("ddpkit.watch.starting")
            joining.assemble(job, opened, lost)
            _install_hooks(job)
    except BaseException as error:
        current_job.job = job
        cause = error
        if not isinstance(error, LaunchError) or error.is_failure:
            cause = report(error)
        _leave()
        current_job.open_stores.clear()
        try:
            if cause is not error:
                raise cause from error
            raise
        finally:
            del cause  # or it, its traceback and this frame keep each other, and the store
    current_job.job = job
    ranks.set_launch(job.launch)
    for hook in current_job.on_join:
        hook()
    if ranks.is_main_process():
        log.info("joined\n%s", job.context)
    return job


def check_torch(version: str = torch.__version__) -> None:
    """Raise if torch is too old: vendors' builds of it are often installed past pip's own check."""
    release = [int(number) for number in re.findall("[0-9]+", version)[:2]]
    if tuple(release) < _OLDEST_TORCH:
        oldest = ".".join(map(str, _OLDEST_TORCH))
        raise LaunchError(f"ddpkit needs torch {oldest} or newer, found {version}.")


def checked_launch(asked: Options) -> Launch:
    """Return the launch that the caller or the environment describes; if it is refused, tell peers that may wait."""
    launch, warning = asked.launch, ""
    try:
        check_torch()
        if launch is None:
            launch, warning = unnested_launch()
    except LaunchError as error:
        import_module(".refusal", __package__).tell_peers(error, launch)
        raise
    if warning:
        log.warning("%s", warning)
    return launch


def _let_children_keep_groups() -> None:
    """Keep forked children, such as a loader's workers, from destroying the process groups of this process.

    A group that is destroyed waits for gloo's threads, which no child has: one that is garbage, in a reference cycle,
    and one that lives until a child ends by `sys.exit`.
    """
    global _children_keep_groups
    if not _children_keep_groups:
        os.register_at_fork(after_in_child=_keep_groups)
        _children_keep_groups = True


def _keep_groups() -> None:
    gc.freeze()
    for group in groups():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))  # a reference that nobody gives back


def _install_hooks(job: Job) -> None:
    """See to it that the other ranks hear how this process ends."""
    job.former_hook = sys.excepthook
    sys.excepthook = _excepthook
    job.former_error = id(last_error())
    atexit.register(_at_exit)
    job.finalizer = multiprocessing.util.Finalize(None, _at_child_exit, exitpriority=100)


def teardown() -> None:
    """Leave the job and destroy the group that `setup()` made; harmless when there is none. Runs at exit by itself.

    It waits for no other rank, but the one that hosts the store stays for at most 2 s while others are still leaving.
    After a failure, or if the store does not answer, it may take a few seconds.

    Where it is called in an `except` or `finally` block, all ranks hear of the exception at once, as where one leaves
    the block of `distributed()`. A `KeyboardInterrupt` and an exit with code 0 are no failures.

    Raises:
        PeerError: When it has left, if a collective was refused in a second thread, which is all that this has ended.

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
    """Raise in the main thread what another thread was refused with, which has ended only that."""
    if job is not None and job.session is not None and job.refused:
        job.session.failures.raise_if_known()


def _leave(at_exit: bool = False, lingers: bool = True) -> None:
    """Leave the job.

    Args:
        at_exit: Whether the process is ending. Its exit code then tells whether this rank has failed.
        lingers: Whether the host of the store waits for those who still need it.
    """
    job = current_job.job
    try:
        if job is not None:
            _leave_job(job, at_exit, lingers)
    finally:  # not before: until then a thread that calls a collective is refused, or it would join the group again
        current_job.job = None
        ranks.set_launch(None)


def _leave_job(job: Job, at_exit: bool, lingers: bool) -> None:
    for hook in current_job.on_leave:
        hook()
    job.undo_changes()
    session = job.own_session()
    if session is None:
        return
    session.failures.settled = True  # nothing is raised in here
    _put_hook_back(job)
    atexit.unregister(_at_exit)
    if job.finalizer:
        job.finalizer.cancel()
    failed = session.failures.known is not None
    if failed:
        session.cut_connections(settled=True)
        if not job.hosts_store:  # a DDP model may hold its port
            current_job.open_stores.clear()
    if job.watch:
        job.watch.close(tells_code=at_exit and not failed)
    destroy_group(job, session)  # before lingering: it frees ranks stuck with us
    session.leave(lingers and job.hosts_store)
    if job.watch and at_exit:
        job.watch.hand_over()


def _put_hook_back(job: Job) -> None:
    """Put the exception hook of the script back; torch's, which names the rank, where the process may end now."""
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
    if error is not None and id(error) != job.former_error:  # nobody has caught it, and another hook has shown it
        report(error)
    _leave(at_exit=True)


def _remove_hook_left() -> None:
    """Put the script's exception hook back where torch's has stayed, for this process goes on."""
    global _hooks_left
    if _hooks_left is not None and sys.excepthook is _hooks_left[0]:
        sys.excepthook = _hooks_left[1]
    _hooks_left = None


def _at_child_exit() -> None:
    """Leave when a child of multiprocessing ends, where the interpreter's own hooks do not run."""
    error = sys.exc_info()[1]
    if error:
        report(error)
    _leave()


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
    """Call `setup()` and `teardown()` around a block; takes the arguments of `setup()`. Collective.

    When the block ends, so do the checkpoints that `save(wait=False)` has begun, and what went wrong with one is raised
    on every rank. When the block raises, the other ranks are told first, torchrun's error file is filled, and nothing
    waits for the group. When it raises because a peer failed, a `PeerError` that names the peer takes the place of the
    connection error.

    Example:
        >>> with distributed() as context:
        ...     print(context.world_size)
        1
    """
    outer = current_job.job
    outermost = outer is None or not outer.is_current()
    context = setup(
        backend=backend,
        device=device,
        timeout=timeout,
        num_threads=num_threads,
        watch=watch,
        launch=launch,
    )
    try:
        yield context
        if outermost:
            current_job.finish()
            _raise_if_refused(current_job.job)
    except BaseException as error:
        cause = report(error) if outermost else error  # else the block around it may handle it
        if cause is not error:
            raise cause.with_traceback(error.__traceback__) from error
        raise
    finally:
        if outermost:
            _leave()


def joined() -> bool:
    """Return whether there are peers to talk to. Adopts a group that somebody else made before. Collective then.

    Raises:
        DdpkitError: In a block in which ranks stay apart; in a second thread.
        NotSetUpError: If several processes were launched but not set up, or their group has been destroyed or replaced.
    """
    if _apart:
        raise DdpkitError(
            f"In a block of {_apart} no values can be exchanged with other ranks, for one that raises there would "
            "keep the others waiting. Call it before or after the block."
        )
    job = current_job.job
    if job is None or not job.is_current():
        job = _join_group()
    if job is None:
        return False
    _refuse_forked(job)
    if job.session is None or job.context.world_size == 1:
        return False
    job.session.acted_at = time.monotonic()
    if threading.current_thread() is not job.caller:
        _check_thread(job, threading.current_thread())
    return True


def _check_thread(job: Job, thread: threading.Thread) -> None:
    """Refuse a second thread, for which the collectives of ranks meet in any order; see to it that all ranks fail.

    A thread may go on where the one before it has ended. A backward runs hooks in threads of its own, which Python has
    not started, and waits for them.
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
        f"Thread {thread.name!r} calls a collective, but thread {first.name!r} calls those of this job, and ranks "
        "could not tell which of them meet. Call all of them in one thread, wrap_model() and the first one included."
    )
    failure = session.failure_of(error)
    current_job.interrupt(failure)
    job.refused = True
    job.caller = None  # so that no thread calls one any more
    session.failures.announce(failure)
    raise error


@contextmanager
def apart(call: str) -> Iterator[None]:
    """Refuse ddpkit's own exchanges in a block in which one rank may raise alone; refuse one block in another, too."""
    global _apart
    joined()
    _apart = call
    try:
        yield
    finally:
        _apart = ""


def _join_group() -> Job | None:
    """Join a group that somebody else made before there was a job; return None on one process without a group."""
    former = current_job.job
    if former is not None:
        size = former.context.world_size
        raise NotSetUpError(
            f"The process group of this job, of {size} ranks, has been destroyed, or another has taken its place. Call "
            "ddpkit.teardown() where the job ends, instead of dist.destroy_process_group(); to go on, call "
            "ddpkit.setup() again, on every rank that has the new group, or on all."
        )
    if dist.is_initialized():
        job = _begin(Options(watch=False))
        if ranks.is_main_process():
            advice = "call ddpkit.setup() on every rank, and a rank that fails is named at once on the others"
            log.info("adopted a process group that was there before, without a watch: %s", advice)
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
    if not joined():
        return [text]
    return current_job.current_session().exchange(text, ranks=subset)


def report(error: BaseException) -> BaseException:
    """Tell the peers that this rank is failing; return the error to show, which is a peer's if that was the cause."""
    try:
        return _report(error)
    except DdpkitError as heard:  # raised meanwhile by the watch, which does so once
        return _report(heard)


def _report(error: BaseException) -> BaseException:
    if ended_well(error):
        return error
    job = current_job.job
    if job is not None and job.session is not None and job.session.is_own:
        error = job.session.cause_of(error) or error
        publish(error, job.session, job.watch)
    fill_error_file(error)
    return error


def _excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    hook = _hook_that_shows(current_job.job) if current_job.job else sys.__excepthook__
    shown = report(error)
    if shown is not error:
        shown.__cause__ = error
        kind, shown = type(shown), shown.with_traceback(trace)
    hook(kind, shown, trace)


def _hook_that_shows(job: Job) -> Any:
    """Return an exception hook that writes an error of ddpkit's with its cause first, unless the script has its own."""
    former, prefix = job.former_hook, f"[rank{job.launch.rank}]: "
    if job.first_hook is not sys.__excepthook__ and job.first_hook.__module__ != dist.distributed_c10d.__name__:
        return former

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, DdpkitError):
            former(kind, error, trace)
            return
        sys.stderr.write("".join(prefix + line for line in report_of(error).splitlines(keepends=True)))
        sys.stderr.flush()

    return show
