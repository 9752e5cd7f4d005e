"""Start a rank's process, call functions in it, and describe its stack and its end.

Shared with `testing`.
"""

from __future__ import annotations

import faulthandler
import importlib
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import process as multiprocess
from multiprocessing.connection import Connection, wait
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

from ..errors import PeerError, message_of, trace_of
from ..job import lifecycle
from ..job.leaving import ended_well

R = TypeVar("R", bound="RankProcess")
_STACK_SIGNAL = signal.SIGUSR2
_STACK_BEGINS = 3.0  # seconds until a stack arrives; a busy machine may be slow
_STACK_GOES_ON = 0.1  # seconds from one line to the next


def rank_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Build the environment variables of a rank on this node that joins the store at `port`."""
    env = {key: text for key, text in os.environ.items() if not key.startswith("TORCHELASTIC_")}
    return env | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "DDPKIT_SPAWN": "1",
        # torch's own init then joins the store, too, instead of hosting one
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def replace_environment(env: dict[str, str]) -> None:
    """Replace this process's environment variables."""
    os.environ.clear()
    os.environ.update(env)


class RankProcess:
    """The process of one rank, and the pipe to it.

    Args:
        rank: The rank.
        env: Environment variables of the process.
        preload: Modules that its forkserver imports.
        main: Function called in the process, with the rank's end of the pipe.
        *args: Further arguments for it.
    """

    def __init__(
        self,
        rank: int,
        env: dict[str, str],
        preload: list[str],
        main: Callable[..., None],
        *args: Any,
    ) -> None:
        self.rank = rank
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(preload)
        self.pipe, theirs = context.Pipe()
        self._stack, stack = context.Pipe(duplex=False)
        everything = (stack, env, main, theirs, *args)
        self.process = context.Process(target=_begin, args=everything, name=f"rank {rank}")
        self.process.start()
        theirs.close()
        stack.close()

    def next_message(self) -> Any:
        """Receive a message; None if the rank has died."""
        try:
            if not self.pipe.poll():  # it has died, and one of its children holds the pipe
                return None
            return self.pipe.recv()
        except (EOFError, OSError):
            return None

    def read_stack(self) -> str:
        """Request the rank's stack; report if it does not answer."""
        with suppress(ProcessLookupError):  # it has just ended
            os.kill(self.process.pid or 0, _STACK_SIGNAL)
        text = b""
        patience = _STACK_BEGINS
        while self._stack.poll(patience):
            line = os.read(self._stack.fileno(), 1 << 16)
            if not line:  # it has just ended
                break
            text += line
            patience = _STACK_GOES_ON
        return text.decode(errors="replace") or "  (no answer: stopped?)\n"

    def close(self) -> None:
        """Close the pipes."""
        self.pipe.close()
        self._stack.close()


def _begin(stack: Connection, env: dict[str, str], main: Callable[..., None], *args: Any) -> None:
    """Start as a rank: set its environment, and write its stack on request."""
    replace_environment(env)
    # a loader's workers start in the user's default way, not in this process's
    multiprocessing.set_start_method(None, force=True)
    faulthandler.register(_STACK_SIGNAL, file=stack.fileno(), all_threads=False)
    main(*args)


def wait_for_messages(ranks: list[R], deadline: float) -> list[R]:
    """Return the ranks that have sent something or died; none after the time-out."""
    sources: dict[Any, R] = {}
    for rank in ranks:
        sources[rank.pipe] = rank
        sources[rank.process.sentinel] = rank  # one of its children may hold the pipe
    ready = wait([*sources], timeout=max(0.0, deadline - time.monotonic()))
    return list(dict.fromkeys(sources[source] for source in ready))


def describe_exit(process: Any) -> str:
    """Wait for a process to end and describe how: "killed by SIGKILL", or "exited with code 1"."""
    process.join()
    code = process.exitcode
    if -code in set(signal.Signals):
        return f"killed by {signal.Signals(-code).name}"
    if code < 0:
        return f"killed by signal {-code}"
    return f"exited with code {code}"


def first_cause(errors: Sequence[tuple[int, BaseException]]) -> BaseException:
    """Choose the first of some ranks' errors that is more than a report of another rank's failure."""
    _, error = min(errors, key=_is_echo)
    return error


def _is_echo(entry: tuple[int, BaseException]) -> bool:
    rank, error = entry
    return isinstance(error, PeerError) and error.rank != rank


# Functions, arguments and results are pickled by name, otherwise by value.


def dump_call(caller: str, fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """Pickle a function with its arguments; `pickle.loads` returns both.

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
            f"{message_of(error)}. Define it at the top level of a module and import it from there. "
            "Lambdas, inner functions and functions from a notebook need cloudpickle: "
            "pip install cloudpickle."
        ) from error


def dump(value: Any) -> bytes:
    """Pickle a value by name; by value with cloudpickle if other processes cannot import it."""
    try:
        data = pickle.dumps(value)  # copies tensors; multiprocessing's own pickler would share them
        if b"__main__" in data and not can_import(sys.modules["__main__"]):
            raise pickle.PicklingError("it was defined in a notebook, at a prompt or on stdin")
        return data
    except Exception:
        with suppress(ImportError):
            return bytes(importlib.import_module("cloudpickle").dumps(value))
        raise


def can_import(main: ModuleType) -> bool:
    """Return whether another process can import the main program: a file or module, not a notebook."""
    if main.__spec__ is not None:
        return True
    file = getattr(main, "__file__", None)
    if file is None:
        return False
    folder = getattr(multiprocess, "ORIGINAL_DIR", None) or ""
    return os.path.exists(os.path.join(folder, file))


class Reply(NamedTuple):
    """The outcome of a call on a rank, as sent to the caller's process.

    Attributes:
        failed: Whether the function raised.
        pickled: The result or the exception; empty if the exception cannot be pickled.
        error_type: Name of the exception's class.
        message: Text of the exception.
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
        call: The function and its arguments, from `dump_call`.
        begin: Called before the function, after its import.
        may_exit: Whether `sys.exit(0)` ends the function without a result instead of failing.
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
            words = f"its result cannot be unpickled here: {message_of(error)}"
            cause = PeerError(rank, host, type(error).__name__, words)
        return cause, None
    if not reply.failed:
        return None, value
    if not isinstance(value, Exception):  # SystemExit would end the caller
        return cause, None
    value.__cause__ = cause
    return value, None
