"""Call a function on this rank, for `on_ranks`."""

from __future__ import annotations

import os
import pickle
import socket
import traceback
from collections.abc import Callable
from contextlib import suppress

from ..errors import PeerError
from ..process_group import lifecycle
from ..spawning.pickling import dump
from .messages import Done


def call(pickled: bytes, begin: Callable[[], None]) -> Done:
    """Call the function on this rank, and tell the other ranks if it fails.

    Args:
        pickled: The function and its arguments.
        begin: Called before the function, when it has been imported.
    """
    try:
        fn, args = pickle.loads(pickled)
        begin()
        return Done(False, dump((None, fn(*args), "")))
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:
            return Done(False, dump((None, None, "")))
        return Done(True, _dump_error(lifecycle.report(error)))


def _dump_error(error: BaseException) -> bytes:
    """Pickle an error with its traceback, as a `PeerError` where it cannot be pickled itself."""
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    if isinstance(error, Exception):  # SystemExit would end the test process
        with suppress(Exception):
            pickled = dump((error, None, text))
            pickle.loads(pickled)
            return pickled
    rank = int(os.environ["RANK"])
    peer = PeerError(rank, socket.gethostname(), type(error).__name__, str(error), text)
    return dump((peer, None, text))
