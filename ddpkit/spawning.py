"""Launch ranks from Python: real processes, which join as torchrun's workers do.

The process of a rank, and calls in it, are shared with `testing`.
"""

from __future__ import annotations

import codecs
import faulthandler
import importlib
import logging
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing import process as multiprocess
from multiprocessing.connection import Connection, wait
from types import ModuleType
from typing import Any, Literal, NamedTuple, TextIO, TypeVar, overload

from .arguments import as_integer, check_timeout
from .errors import PeerError, message_of, trace_of
from .job import lifecycle
from .job.leaving import ended_well
from .logging import FORWARDED
from .rendezvous.store import host_on

T = TypeVar("T")
R = TypeVar("R", bound="RankProcess")
_AFTER_FAILURE = 10.0  # seconds for the other ranks to report after the first failure
_EXITING = 10.0  # seconds for a rank to exit after its report


@overload
def spawn(
    fn: Callable[..., T],
    nprocs: int,
    *args: Any,
    timeout: timedelta = ...,
    end_together: Literal[True] = ...,
) -> list[T]: ...


@overload
def spawn(
    fn: Callable[..., T],
    nprocs: int,
    *args: Any,
    timeout: timedelta = ...,
    end_together: bool,
) -> list[T | BaseException]: ...


def spawn(
    fn: Callable[..., T],
    nprocs: int,
    *args: Any,
    timeout: timedelta = timedelta(minutes=10),
    end_together: bool = True,
) -> Any:
    """Run `fn(*args)` in `nprocs` new processes of one job and return their results.

    `fn` corresponds to a script's `main()` under torchrun: it calls `setup()` or `distributed()`
    itself. In a script, call `spawn` under `if __name__ == "__main__":`.

    If this process has configured logging, its handlers also get the ranks' records, with the rank in
    `record.rank`. The ranks' output goes to this process's `sys.stdout` and `sys.stderr`, even in a
    notebook.

    Args:
        fn: A function that can be pickled: defined at the top level of a module. With cloudpickle
            installed also a lambda, an inner function, or one from a notebook.
        nprocs: Number of processes, at least 1.
        *args: Passed to every rank as copies; tensors are not shared.
        timeout: Time-out of the whole run.
        end_together: Whether to end the other ranks when one has failed. With False, for functions
            that `survive` the loss of ranks, it waits for them.

    Returns:
        The ranks' results, by rank; with `end_together=False`, a failed rank's exception instead of
        its result.

    Raises:
        Exception: The exception of the rank that failed first; its `__cause__`, a `PeerError`, has the
            rank and traceback. With `end_together=False`, only if all failed.
        PeerError: If a process died without an exception, or the exception cannot be pickled.
        TimeoutError: After the time-out; the message has the stack of every unfinished rank.
        TypeError: If `fn` or an argument cannot be sent to other processes; then none is started.

    Example:
        >>> spawn(divmod, 2, 7, 2)
        [(3, 1), (3, 1)]
    """
    nprocs = as_integer(nprocs, "nprocs")
    check_timeout(timeout)
    call = dump_call("spawn", fn, args)
    log = _describe_logging()
    store = host_on("127.0.0.1")
    ranks: list[_SpawnedRank] = []
    with _copied_output() as outputs:
        try:
            with _main_program_of_child():
                for rank in range(nprocs):
                    env = rank_environment(rank, nprocs, store.port)
                    ranks.append(_SpawnedRank(rank, env, ["torch", "ddpkit"], _run_rank, outputs, log, call))
            return _results(ranks, timeout, end_together)
        finally:  # on Ctrl-C, too
            for each in ranks:
                each.end()


@contextmanager
def _main_program_of_child() -> Iterator[None]:
    """Allow a program on stdin to start processes: multiprocessing would look for a file <stdin>."""
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    if file is None or can_import(main):
        yield
        return
    del main.__file__
    try:
        yield
    finally:
        main.__file__ = file


def _results(ranks: list[_SpawnedRank], timeout: timedelta, end_together: bool) -> list[Any]:
    """Wait for all ranks and return their results, or raise the error of the first that failed."""
    deadline = time.monotonic() + timeout.total_seconds()
    errors: list[tuple[int, BaseException]] = []  # in order of arrival
    while unfinished := [each for each in ranks if not each.done]:
        ready = wait_for_messages(unfinished, deadline)
        if not ready:
            break
        for each in ready:
            each.receive()
            if each.error is not None:
                errors.append((each.rank, each.error))
        if errors and end_together:
            deadline = min(deadline, time.monotonic() + _AFTER_FAILURE)
    if errors and (end_together or len(errors) == len(ranks)):
        raise first_cause(errors)
    if unfinished:
        stacks = "\n".join(f"rank {each.rank}:\n{each.read_stack()}" for each in unfinished)
        raise TimeoutError(f"spawn() ended after {timeout}; not finished:\n{stacks}")
    return [each.error or each.result for each in ranks]


def first_cause(errors: Sequence[tuple[int, BaseException]]) -> BaseException:
    """Choose the first of some ranks' errors that is more than a report of another rank's failure."""
    for rank, error in errors:
        if not isinstance(error, PeerError) or error.rank == rank:
            return error
    return errors[0][1]


def _run_rank(
    pipe: Connection,
    outputs: dict[int, Connection],
    parent_logging: dict[str, Any],
    call: bytes,
) -> None:
    """Run as one rank: call the function and report its result or error."""
    _redirect(outputs)
    forwarder = _Forwarder(pipe.send)
    forwarder.install(parent_logging)
    reply = call_and_reply(call)
    lifecycle.teardown()
    forwarder.uninstall()
    pipe.send(reply)


# The process of a rank.

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

    label = "rank"

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
        self.process = context.Process(target=_begin, args=everything, name=f"{self.label} {rank}")
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

    def wait_for_exit(self) -> str:
        """Wait for the process to end, and describe how."""
        self.process.join()
        return describe_exit(self.process.exitcode or 0)

    def close(self) -> None:
        """Close the pipes."""
        self.pipe.close()
        self._stack.close()


def _begin(stack: Connection, env: dict[str, str], main: Callable[..., None], *args: Any) -> None:
    """Start as a rank: set its environment, write its stack on request, and exit with the process that launched it."""
    replace_environment(env)
    # a loader's workers start in the user's default way, not in this process's
    multiprocessing.set_start_method(None, force=True)
    faulthandler.register(_STACK_SIGNAL, file=stack.fileno(), all_threads=False)
    threading.Thread(target=_exit_with_parent, args=(stack,), daemon=True).start()
    main(*args)


def _exit_with_parent(stack: Connection) -> None:
    wait([stack])  # an error: the other end has been closed
    os._exit(1)


def wait_for_messages(ranks: list[R], deadline: float) -> list[R]:
    """Return the ranks that have sent something or died; none after the time-out."""
    sources: dict[Any, R] = {}
    for rank in ranks:
        sources[rank.pipe] = rank
        sources[rank.process.sentinel] = rank  # one of its children may hold the pipe
    ready = wait([*sources], timeout=max(0.0, deadline - time.monotonic()))
    return list(dict.fromkeys(sources[source] for source in ready))


def describe_exit(code: int) -> str:
    """Describe how a process has ended: "killed by SIGKILL", or "exited with code 1"."""
    if code >= 0:
        return f"exited with code {code}"
    if -code in set(signal.Signals):
        return f"killed by {signal.Signals(-code).name}"
    return f"killed by signal {-code}"


class _SpawnedRank(RankProcess):
    """The process of one rank, and its reported result or error.

    Attributes:
        done: Whether it has returned, raised or died.
        result: Result of the function.
        error: Exception of the function, or a description of the process's death.
    """

    done = False
    result: Any = None
    error: BaseException | None = None

    def receive(self) -> None:
        """Receive one message from the rank: a record for the log, or the result of the call."""
        message = self.next_message()
        if isinstance(message, dict):
            record = logging.makeLogRecord(message)
            logging.getLogger(record.name).handle(record)
            return
        self.done = True
        self.error, self.result = open_reply(self.rank, message or lost(self.rank, self.wait_for_exit()))

    def end(self) -> None:
        """End the process, at once if it has not reported yet."""
        if not self.done:
            self.process.kill()
        self.process.join(_EXITING)  # it still flushes its output and ends its helper processes
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.close()  # the rank exits when the pipes close


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
        pickled: The result, or the function's exception; empty if that cannot be pickled.
        failure: Describes the exception; None if the function has returned.
    """

    pickled: bytes
    failure: PeerError | None = None


def call_and_reply(call: bytes, begin: Callable[[], None] = lambda: None, may_exit: bool = True) -> Reply:
    """Call a function on this rank, and tell the other ranks if it fails.

    Args:
        call: The function and its arguments, from `dump_call`.
        begin: Called before the function, after its import.
        may_exit: Whether `sys.exit(0)` ends the function without a result instead of failing.
    """
    rank, host = int(os.environ["RANK"]), socket.gethostname()
    try:
        fn, args = pickle.loads(call)
        begin()
        return Reply(dump(fn(*args)))
    except BaseException as raised:
        if may_exit and ended_well(raised):
            return Reply(dump(None))
        error = lifecycle.report(raised)
    pickled = b""
    with suppress(Exception, SystemExit):
        pickled = dump(error)
    return Reply(pickled, PeerError(rank, host, type(error).__name__, message_of(error), trace_of(error)))


def lost(rank: int, why: str, trace: str = "") -> Reply:
    """Return the reply of a rank that gave none."""
    return Reply(b"", PeerError(rank, socket.gethostname(), "lost", why, trace))


def open_reply(rank: int, reply: Reply) -> tuple[BaseException | None, Any]:
    """Return the error of a rank, or None and its result."""
    failure = reply.failure
    try:
        value = pickle.loads(reply.pickled)
    except (Exception, SystemExit) as error:
        words = f"its result cannot be unpickled here: {message_of(error)}"
        return failure or PeerError(rank, socket.gethostname(), type(error).__name__, words), None
    if failure is None:
        return None, value
    if not isinstance(value, Exception):  # SystemExit would end the caller
        return failure, None
    value.__cause__ = failure
    return value, None


# Forward the output of ranks where a notebook or a test has replaced the streams.

_CHUNK = 1 << 16  # bytes read at a time
_Decoder = codecs.getincrementaldecoder("utf-8")  # keeps incomplete characters for the next call


@contextmanager
def _copied_output() -> Iterator[dict[int, Connection]]:
    """Copy output to this process's own streams from pipes; yield their write ends.

    They are yielded by the descriptor that they replace in the ranks; none if this process has no streams of its own,
    because the ranks then write to the same descriptors.
    """
    writers = {}
    outputs = {}
    for number, stream in {1: sys.stdout, 2: sys.stderr}.items():
        if stream and not _writes_to(stream, number):
            reader, writers[number] = Pipe(duplex=False)
            outputs[reader] = stream
    ended, end = Pipe(duplex=False)
    copier = threading.Thread(target=_copy, args=(outputs, ended), daemon=True)
    copier.start()
    try:
        yield writers
    finally:
        end.close()
        copier.join(5.0)
        for pipe in (*writers.values(), *outputs, ended):
            pipe.close()


def _writes_to(stream: TextIO, number: int) -> bool:
    try:
        return stream.fileno() == number
    except (AttributeError, OSError, ValueError):  # a notebook's stream may have no descriptor
        return False


def _copy(outputs: dict[Connection, TextIO], ended: Connection) -> None:
    """Copy output until the other end of `ended` is closed and nothing is left to read."""
    decoders = {reader: _Decoder(errors="replace") for reader in outputs}
    ready: list[Any] = []
    while ready != [ended]:
        ready = wait([*outputs, ended])
        for reader in outputs.keys() & {*ready}:
            data = os.read(reader.fileno(), _CHUNK)
            outputs[reader].write(decoders[reader].decode(data))
            outputs[reader].flush()


def _redirect(writers: dict[int, Connection]) -> None:
    """Redirect this process's output to the pipes of `_copied_output`."""
    if not writers:
        return
    for number, writer in writers.items():
        os.dup2(writer.fileno(), number)
        writer.close()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            # line-buffered, even under python -u
            stream.reconfigure(line_buffering=True, write_through=False)


# Forward the log records of ranks to the handlers of the launching process.


def _describe_logging() -> dict[str, Any]:
    """Describe this process's logging for its ranks: each logger's level, and whether it has handlers."""
    known = {"": logging.root} | logging.root.manager.loggerDict
    loggers = {name: logger for name, logger in known.items() if isinstance(logger, logging.Logger)}
    described = {name: (logger.level, _has_handler(logger)) for name, logger in loggers.items()}
    return {"disable": logging.root.manager.disable, "loggers": described}


def _has_handler(logger: logging.Logger) -> bool:
    return any(not isinstance(handler, logging.NullHandler) for handler in logger.handlers)


class _Forwarder(logging.Handler):
    """Sends records to the launching process, for its handlers and filters.

    They are sent as text, with those added attributes that are numbers or text.
    """

    def __init__(self, send: Callable[[dict[str, Any]], None]) -> None:
        super().__init__()
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._place = {"rank": rank, "world_size": world_size, FORWARDED: True}
        self._send = send
        self._loggers: list[logging.Logger] = []
        self._last: logging.LogRecord | None = None

    def install(self, parent: dict[str, Any]) -> None:
        """Log as the parent does, described by its `_describe_logging`.

        Loggers get its levels; those with handlers there and none here get this one.
        """
        logging.disable(parent["disable"])
        for name, (level, has_handler) in parent["loggers"].items():
            logger = logging.getLogger(name)
            if level:
                logger.setLevel(level)
            if has_handler and not _has_handler(logger):
                logger.addHandler(self)
                self._loggers.append(logger)
        # a loader's worker must not write to the pipe
        os.register_at_fork(after_in_child=self.uninstall)

    def uninstall(self) -> None:
        """Stop sending: later records stay in this process."""
        for logger in self._loggers:
            logger.removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Send a copy of a record, once, as text."""
        if record is self._last:  # already sent by another logger on its way up
            return
        self._last = record
        try:
            self._send(self._pack(record))
        except Exception:
            self.handleError(record)

    def _pack(self, record: logging.LogRecord) -> dict[str, Any]:
        fields = vars(record) | self._place | {"msg": record.getMessage()}
        if record.exc_info and not record.exc_text:
            fields["exc_text"] = logging.Formatter().formatException(record.exc_info)
        plain = (str, int, float)
        return {name: value for name, value in fields.items() if isinstance(value, plain)}
