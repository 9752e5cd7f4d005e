"""The current job of this process, as other modules query it. `lifecycle` starts and ends it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from ..launch import ranks
from ..torch_internals import current_group
from .device import choose_device, count_accelerators
from .job import Job, Options, Peers, ranks_of

if TYPE_CHECKING:
    from ..rendezvous.session import Session

job: Job | None = None
# hooks of optional modules, called when this process has joined a job, and when it leaves one
on_join: list[Callable[[], None]] = []
on_leave: list[Callable[[], None]] = []
open_stores: dict[Any, Any] = {}  # stores that this process hosts for a later join, by the launcher's address
load_watch: Any = None  # imports the watch, for several ranks; set by `ddpkit`
start_watch: Any = None  # set by the watch
# what the latest training loop has used: "backward" of averaged gradients, a loader's "weight", "gather_batch"; and the
# count that this rank gave "global_mean" last
weighting: dict[str, float] = {}
_batches: deque[Sequence[object]] = deque(maxlen=64)  # samples of the batches that loaders returned last


def has_job() -> bool:
    """Return whether this process has called `setup()` and not left since."""
    return job is not None


def is_watched() -> bool:
    """Return whether this process learns of failures on other ranks while it computes."""
    return job is not None and job.watch is not None


def watch() -> Any:
    """Return this process's watch; call it only where `is_watched()` is true."""
    assert job is not None
    return job.watch


def session() -> Session | None:
    """Return the session of the job, None on one process and where there is no job."""
    return None if job is None else job.session


def has_peers() -> bool:
    """Return whether the job that this process has joined is one of several ranks."""
    return job is not None and job.session is not None and job.context.world_size > 1


def current_session() -> Session:
    """Return the session of the joined job; call it only where `has_peers()` is true."""
    found = session()
    assert found is not None
    return found


def asked_options() -> Options:
    """Return the arguments of `setup()`; call it only where there is a job."""
    assert job is not None
    return job.asked


def owns_group() -> bool:
    """Return whether `setup()` created the process group, or there is none."""
    return job is None or session() is None or job.owns_group


def hold_failures(hold: bool, grace: float | None = None) -> None:
    """Defer interruptions by a peer's failure, or allow them again.

    Args:
        hold: Whether to defer them.
        grace: Seconds to handle a failure after that.
    """
    if (mine := session()) is not None:
        mine.failures.held = hold
        if grace is not None:
            mine.failures.grace = grace


def get_device() -> torch.device:
    """Return the device that `setup()` bound to this rank; before `setup()`, the one that it would bind.

    Raises:
        NotSetUpError: If there are several accelerators and the launcher does not set the local rank; `setup()` gets it
            from the other ranks.

    Example:
        >>> batch = torch.ones(4, 2).to(get_device())
    """
    if job is not None and (job.is_current() or current_group() is None):
        return job.context.device
    launch = ranks.current_launch()
    if launch.local_rank is None and count_accelerators() > 1:
        ranks.get_local_rank()  # raises
    return choose_device(None, launch.local_rank or 0, launch.local_world_size or 1)


def data_parallel() -> Peers | None:
    """Return the data-parallel ranks, this one included; None if those are all ranks of the job."""
    return job.data_parallel if job is not None and job.is_current() else None


def choose_data_parallel(peers: Peers | None) -> None:
    """Set the data-parallel ranks for the lifetime of this job; call it only where `has_peers()` is true."""
    assert job is not None
    job.data_parallel = peers


def get_data_parallel_rank() -> int:
    """Return this process's index among the data-parallel ranks, from 0; its rank unless `set_data_parallel` was used.

    Example:
        >>> get_data_parallel_rank()
        0
    """
    return ranks_of(data_parallel()).index(ranks.get_rank())


def get_data_parallel_world_size() -> int:
    """Return the number of data-parallel ranks; the world size unless `set_data_parallel` was used.

    Example:
        >>> get_data_parallel_world_size()
        1
    """
    return len(ranks_of(data_parallel()))


@contextmanager
def peer_errors() -> Iterator[None]:
    """Raise `PeerError`, naming the peer, if a torch call in this block breaks because a peer failed.

    ddpkit's own calls already do this. A torch collective, or the `backward` of a DDP model, may raise a plain
    `RuntimeError` about a connection before this rank learns of the failure: run those in this block to catch
    `PeerError`. All other errors are unchanged, and on one process nothing happens.

    Raises:
        PeerError: If another rank failed, left or did not arrive; at the start of the block, if that is known already.
        MismatchError: If the ranks were in different collectives.

    Example:
        >>> import torch
        >>> from ddpkit import PeerError
        >>> model = torch.nn.Linear(1, 1)
        >>> try:
        ...     with peer_errors():
        ...         model(torch.ones(1)).backward()
        ... except PeerError as error:
        ...     print(f"rank {error.rank} failed")  # save what there is, then end
    """
    mine = session()
    if mine is not None:
        mine.failures.raise_if_known()  # even if the script swallowed its error
    try:
        yield
    except RuntimeError as error:
        if cause := mine and mine.explain(error, mine):
            raise cause from error
        raise


def set_progress(**progress: int) -> None:
    """Record the script's progress, for reports of what the ranks are doing."""
    if (mine := session()) is not None:
        mine.progress = {name: int(number) for name, number in progress.items()}
        mine.acted_at = time.monotonic()


def add_samples(indices: Sequence[object]) -> None:
    """Record the samples of the batch that a loader returns, or could not make."""
    _batches.append(indices)


def take_samples() -> list[Sequence[object]]:
    """Return the samples of the batches since the last call, at most of the latest 64."""
    taken = list(_batches)
    _batches.clear()
    return taken


def finish_before_leaving(owner: object, finish: Callable[[], None] | None) -> None:
    """Make `distributed()` call a collective function when its block completes; None cancels it."""
    if job is not None:
        job.unfinished.pop(owner, None)
        if finish is not None:
            job.unfinished[owner] = finish


def has_unfinished() -> bool:
    """Return whether all ranks have to wait for something before they leave."""
    return job is not None and bool(job.unfinished)


def finish() -> None:
    """Finish, in the order of their start, the things to be finished before this job ends. Collective then."""
    while job is not None and job.unfinished and job.is_current():
        owner = next(iter(job.unfinished))
        job.unfinished.pop(owner)()
