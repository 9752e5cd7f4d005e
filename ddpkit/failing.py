"""What a rank does when it fails: it asks whether another was the cause, tells the others, and informs torchrun."""

from __future__ import annotations

import json
import os
import re
import time
from contextlib import suppress

import torch.distributed as dist

from .errors import DdpkitError, PeerError
from .store import Session, failure_record, trace_of
from .watch import Watch

# torch raises plain RuntimeErrors too: those of gloo begin with a source file in brackets
_BROKEN = re.compile(r"^\[.*gloo|^Gloo |NCCL (error|communicator)|ncclRemoteError|^\[.*ProcessGroup")


def cause_of(error: BaseException, session: Session) -> DdpkitError | None:
    """The peer's failure behind an error of torch's collectives, if there is one."""
    if not isinstance(error, RuntimeError) or isinstance(error, DdpkitError):
        return None
    return session.verdict() if isinstance(error, dist.DistError) or _BROKEN.search(str(error)) else None


def publish(error: BaseException, session: Session, watch: Watch | None) -> None:
    """Tells the other ranks that this one is failing, or which peer it fails for, unless they know."""
    if session.told is None:
        failure = failure_record(session.rank, error)
        if watch:
            watch.tell(failure)
        with suppress(RuntimeError):  # the store may have gone with its host
            session.record(failure)
        session.told = failure
    session.handled = True


def fill_error_file(error: BaseException) -> None:
    """Lets torchrun show this error, as its `@record` decorator would."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        seconds = int(time.time()) + isinstance(error, PeerError)  # torchrun calls the earliest one the root cause
        message = {
            "message": f"{type(error).__name__}: {error}",
            "extraInfo": {"py_callstack": trace_of(error), "timestamp": f"{seconds}"},
        }
        with suppress(OSError), open(path, "w") as file:
            json.dump({"message": message}, file)
