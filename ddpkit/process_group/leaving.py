"""The steps of leaving a job: the last word to the other ranks, and the end of the process group."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from ..torch_internals import abort_group
from .failures import Failure
from .job import Job
from .session import Session
from .sockets import cut


def say_goodbye(job: Job, session: Session, error: BaseException | None, at_exit: bool) -> None:
    """Tell the other ranks that this one leaves.

    Args:
        job: That it leaves.
        session: The one of the job.
        error: The exception that it is handling, or that has ended it, if the others do not know it.
        at_exit: Whether the process is ending, so that its exit code tells whether it has failed.
    """
    monitor = job.monitor
    reason = None if error is None else Failure.of(session.rank, error)
    if monitor is None:
        if reason and at_exit:
            session.failures.announce(reason)
    elif session.failures.known is None and at_exit:
        monitor.close_at_exit(reason)
    elif error is None:
        monitor.close()
    else:
        job.interrupted = isinstance(error, KeyboardInterrupt)
        monitor.depart(None if job.interrupted else reason)


def destroy_group(job: Job, session: Session) -> None:
    """Destroy the process group, if `setup()` made it and it is still there."""
    if not job.owns_group or not dist.is_initialized() or not job.is_current():
        return
    failed = session.failures.known is not None
    if failed and "nccl" in str(job.context.backend):
        abort_group()  # destroying would wait for operations that cannot end
    else:
        # gloo's thread needs the GIL to drop the last tensor, but torch 2.6 keeps it to destroy the group here, and
        # later versions where a DDP model ends that held the group
        time.sleep(0.1 if torch.__version__ < "2.13" else 0.02)
        dist.destroy_process_group()
    cut(session.connections)  # a DDP model holds the group until the process has ended
