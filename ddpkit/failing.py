"""What a rank does when it fails: it asks whether another was the cause, tells the others, and informs torchrun."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
import traceback
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from .errors import BarrierTimeout, DdpkitError, MismatchError, PeerError
from .store import Session, failure_record, trace_of
from .watch import Watch

# torch raises plain RuntimeErrors too: those of gloo begin with a source file in brackets
_BROKEN = re.compile(r"^\[.*gloo|^Gloo |NCCL (error|communicator)|ncclRemoteError|^\[.*ProcessGroup")
_BY_PEERS = re.compile("timed? ?out|connection|closed|reset|remote|abort", re.IGNORECASE)
_PATIENCE = timedelta(seconds=3)  # in which all ranks notice that a collective broke: its end closes their connections
_LIBRARIES = (os.path.dirname(__file__), os.path.dirname(torch.__file__), contextlib.__file__)


def cause_of(error: BaseException, session: Session) -> DdpkitError | None:
    """What other ranks did to break a collective of torch's: which one failed, left or did not come, or that all came,
    but not to the same. None if that cannot be told.
    """
    if not isinstance(error, RuntimeError) or isinstance(error, DdpkitError):
        return None
    if not isinstance(error, dist.DistError) and not _BROKEN.search(str(error)):
        return None
    if len(dist.distributed_c10d._world.pg_map) > 1:  # who is absent may have no part in the group that it was in
        return session.verdict()
    try:
        places = session.exchange(_place(error), "broken collective", _PATIENCE)
    except BarrierTimeout as late:
        return _absent(error, late) if _BY_PEERS.search(str(error)) else None
    except DdpkitError as cause:
        return cause
    if len(set(places)) == 1:
        return None
    lines = "".join(f"\n  rank {rank}: {place}" for rank, place in enumerate(places))
    return MismatchError(f"A collective broke because the ranks were not in the same one: {error}{lines}")


def _absent(error: BaseException, late: BarrierTimeout) -> PeerError:
    (rank, host), others = late.missing[0], [rank for rank, _ in late.missing[1:]]
    here = ", ".join(str(rank) for rank, _ in late.arrived)
    words = f"it was not in the collective that rank {here} gave up ({error}). Is it stopped, stuck or elsewhere?"
    return PeerError(rank, host, "silent", words + (f" Nor were ranks {others}." if others else ""))


def _place(error: BaseException) -> str:
    """The line of the script that an error comes from."""
    frames = [*traceback.extract_stack(), *traceback.extract_tb(error.__traceback__)]
    theirs = [frame for frame in frames if not frame.filename.startswith(_LIBRARIES)]
    return f"{theirs[-1].filename}:{theirs[-1].lineno} in {theirs[-1].name}: {theirs[-1].line}" if theirs else ""


def publish(error: BaseException, session: Session, watch: Watch | None) -> None:
    """Tells the other ranks that this one is failing, or which peer it fails for, unless they know."""
    if session.told is None:
        failure = failure_record(session.rank, error)
        if watch:
            watch.tell(failure)
        session.announce(failure).join(2.0)
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
