"""What a rank does when it fails: it asks whether another was the cause, tells the others, and informs torchrun."""

from __future__ import annotations

import os
import re
import traceback
from contextlib import suppress

import torch.distributed as dist

from .errors import DdpkitError
from .store import Session, failure_record
from .watch import Watch

_BROKEN = re.compile(r"gloo|NCCL|Connection (closed|reset)|Broken pipe")  # torch raises plain RuntimeErrors too


def cause_of(error: BaseException, session: Session) -> DdpkitError | None:
    """The peer's failure behind an error of torch's collectives, if there is one."""
    if not isinstance(error, RuntimeError) or isinstance(error, DdpkitError):
        return None
    return session.verdict() if isinstance(error, dist.DistError) or _BROKEN.search(str(error)) else None


def publish(error: BaseException, session: Session, watch: Watch | None) -> None:
    """Tells the other ranks that this one is failing, or which peer it fails for, unless they know."""
    if session.told is None:
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        failure = failure_record(session.rank, error, text)
        if watch:
            watch.tell(failure)
        with suppress(RuntimeError):  # the store may have gone with its host
            session.record(failure)
        session.told = failure
    session.handled = True


def fill_error_file(error: BaseException) -> None:
    """Lets torchrun show this error, as its `@record` decorator would."""
    if os.environ.get("TORCHELASTIC_ERROR_FILE"):
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(error)
