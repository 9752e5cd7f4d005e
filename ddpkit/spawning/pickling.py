"""Pickle functions, arguments and results for other processes: by name, or else by value."""

from __future__ import annotations

import importlib
import io
import os
import pickle
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import process
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

from ..errors import PeerError, message_of, trace_of
from ..job import lifecycle
from ..job.leaving import ended_well


def dump_call(caller: str, fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """Pickle a function with its arguments; `pickle.loads` gives both back.

    Args:
        caller: Name of the public function that sends them, for the error.
        fn: The function.
        args: Its arguments.

    Raises:
        TypeError: If they cannot be sent to another process.
    """
    try:
        return dump((fn, args))
    except Exception as error:
        raise TypeError(
            f"{caller}() cannot send {fn!r} and its arguments to other processes: "
            f"{message_of(error)}. Put it at the top of a module and import it from there. "
            "Lambdas, inner functions and what a notebook defines can be sent where cloudpickle "
            "is installed: pip install cloudpickle."
        ) from error


def dump(value: Any) -> bytes:
    """Pickle a value by name, or by value with cloudpickle where no other process can import it."""
    data = io.BytesIO()
    try:
        # plain pickle copies tensors; multiprocessing's own would share them
        _Pickler(data).dump(value)
    except Exception:
        with suppress(ImportError):
            cloudpickle = importlib.import_module("cloudpickle")
            return bytes(cloudpickle.dumps(value))
        raise
    return data.getvalue()


class _Pickler(pickle.Pickler):
    """Refuse names of a main program that other processes cannot import, as a notebook is."""

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, (type, FunctionType)) or obj.__module__ != "__main__":
            return NotImplemented
        if can_import(sys.modules["__main__"]):
            return NotImplemented
        where = "in a notebook, at a prompt or on stdin"
        raise pickle.PicklingError(f"{obj.__qualname__} was defined {where}")


def can_import(main: ModuleType) -> bool:
    """Return whether another process can import the main program: a file or module, no notebook."""
    if main.__spec__ is not None:
        return True
    file = getattr(main, "__file__", None)
    if file is None:
        return False
    folder = getattr(process, "ORIGINAL_DIR", None) or ""
    return os.path.exists(os.path.join(folder, file))


class Reply(NamedTuple):
    """The outcome of a call on a rank, on its way to the process that asked for it.

    Attributes:
        failed: True if the function raised.
        pickled: The result or the exception; empty if the exception cannot be pickled.
        error_type: The name of the exception's class.
        message: The exception's text.
        traceback: Its traceback.
    """

    failed: bool
    pickled: bytes
    error_type: str = ""
    message: str = ""
    traceback: str = ""


def call_and_reply(
    call: bytes,
    begin: Callable[[], None] = lambda: None,
    may_exit: bool = True,
) -> Reply:
    """Call a function on this rank, and tell the other ranks if it fails.

    Args:
        call: The function and its arguments, by `dump_call`.
        begin: Called before the function, when it has been imported.
        may_exit: If true, `sys.exit(0)` is no failure, but ends the function without a result.
    """
    try:
        fn, args = pickle.loads(call)
        begin()
        return Reply(False, dump(fn(*args)))
    except BaseException as error:
        if may_exit and ended_well(error):
            return Reply(False, dump(None))
        return _reply_of_failure(lifecycle.report(error))


def _reply_of_failure(error: BaseException) -> Reply:
    data = b""
    with suppress(Exception, SystemExit):
        data = dump(error)
    return Reply(True, data, type(error).__name__, message_of(error), trace_of(error))


def open_reply(rank: int, reply: Reply) -> tuple[BaseException | None, Any]:
    """Return the error of a rank, or None and its result."""
    host = socket.gethostname()
    cause = PeerError(rank, host, reply.error_type, reply.message, reply.traceback)
    try:
        value = pickle.loads(reply.pickled)
    except (Exception, SystemExit) as error:
        if not reply.failed:
            words = f"what it returned cannot be unpickled here: {message_of(error)}"
            cause = PeerError(rank, host, type(error).__name__, words)
        return cause, None
    if not reply.failed:
        return None, value
    if not isinstance(value, Exception):  # SystemExit would end the caller
        return cause, None
    value.__cause__ = cause
    return value, None
