"""A function called on this rank, for `on_ranks`."""

from __future__ import annotations

import os
import pickle
import socket
import traceback
from collections.abc import Callable
from contextlib import suppress

from ..errors import PeerError
from ..process_group import lifecycle
from .messages import Done


def call(job: bytes, begin: Callable[[], None]) -> Done:
    """Call the function on this rank, and tell the other ranks if it fails."""
    try:
        fn, args = pickle.loads(job)
        begin()
        return Done(False, pickle.dumps((None, fn(*args), "")))
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:
            return Done(False, pickle.dumps((None, None, "")))
        return Done(True, _packed(lifecycle.report(error)))


def _packed(error: BaseException) -> bytes:
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    if isinstance(error, Exception):  # SystemExit would end the test process
        with suppress(Exception):
            packed = pickle.dumps((error, None, text))
            pickle.loads(packed)
            return packed
    peer = PeerError(int(os.environ["RANK"]), socket.gethostname(), type(error).__name__, str(error), text)
    return pickle.dumps((peer, None, text))
