"""Leave a job: report the outcome to the other ranks and torchrun, and destroy the process group."""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ..errors import PeerError, describe_error, trace_of
from ..torch_internals import abort_group, torch_is_before
from .job import Job

if TYPE_CHECKING:
    from ..rendezvous.session import Session

_REPORT_LENGTH = 100_000  # characters of a message in torchrun's report, including a peer's traceback


def publish(error: BaseException, session: Session, watch: Any) -> None:
    """Tell the other ranks that this one is failing, or for which peer it fails, unless they know."""
    if session.failures.known is None:
        failure = session.failure_of(error)
        if watch:
            watch.tell(failure)
        session.failures.announce(failure)
        session.failures.known = failure
    session.failures.muted = True


def ended_well(error: BaseException) -> bool:
    """Return whether Python counts this exit as a success: without a code, or with 0."""
    return isinstance(error, SystemExit) and (error.code is None or (isinstance(error.code, int) and not error.code))


def last_error() -> BaseException | None:
    """Return the uncaught exception that the interpreter keeps before it exits; None if there is none."""
    error: BaseException | None = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    return error


def fill_error_file(error: BaseException) -> None:
    """Make torchrun show this error, as its `@record` decorator would."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    seconds, shown = int(time.time()), error
    if isinstance(error, PeerError):  # torchrun calls the earliest error the root cause
        seconds += 1
        shown = PeerError(error.rank, error.host, error.error_type, error.message)  # the peer reports its traceback
        shown.__traceback__ = error.__traceback__
    message = {
        "message": describe_error(error, _REPORT_LENGTH),
        "extraInfo": {"py_callstack": trace_of(shown), "timestamp": f"{seconds}"},
    }
    with suppress(OSError), open(path, "w") as file:
        json.dump({"message": message}, file)


def destroy_group(job: Job, session: Session) -> None:
    """Destroy the process group, if `setup()` created it and it still exists."""
    if not job.owns_group or not dist.is_initialized() or not job.is_current():
        return
    failed = session.failures.known is not None
    if failed and "nccl" in str(job.context.backend):
        abort_group()  # destroying it would wait for operations that cannot end
    else:
        # gloo's thread needs the GIL to drop the last tensor, but torch 2.6 holds it while it destroys the group here,
        # and later versions while a DDP model that holds the group ends
        time.sleep(0.1 if torch_is_before("2.13") else 0.02)
        dist.destroy_process_group()
    session.cut_connections()  # a DDP model holds the group until the process exits
