"""Launch ranks from Python: real processes, which join as torchrun's workers do."""

from __future__ import annotations

import codecs
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any, Literal, TextIO, TypeVar, overload

from ..arguments import as_integer, check_timeout
from ..errors import PeerError
from ..job import lifecycle
from ..join.store import host_on
from ..logging import FORWARDED
from .rank_process import (
    RankProcess,
    call_and_reply,
    can_import,
    describe_exit,
    dump_call,
    first_cause,
    open_reply,
    rank_environment,
    wait_for_messages,
)

T = TypeVar("T")
_AFTER_FAILURE = 10.0  # seconds for the other ranks to report after the first failure
_EXITING = 10.0  # seconds for a rank to exit after its report
_CHUNK = 1 << 16  # bytes read at a time
_Decoder = codecs.getincrementaldecoder("utf-8")  # keeps incomplete characters for the next call


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
    store = host_on("127.0.0.1")
    ranks: list[_SpawnedRank] = []
    with _copied_output() as outputs:
        try:
            with _main_program_of_child():
                for rank in range(nprocs):
                    env = rank_environment(rank, nprocs, store.port)
                    ranks.append(_SpawnedRank(rank, env, outputs, call))
            return _results(ranks, timeout, end_together)
        finally:  # on Ctrl-C, too
            for process in ranks:
                process.end()


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


class _SpawnedRank(RankProcess):
    """The process of one rank, and its reported result or error.

    Attributes:
        done: Whether it has returned, raised or died.
        result: Result of the function.
        error: Exception of the function, or a description of the process's death.
    """

    def __init__(
        self,
        rank: int,
        env: dict[str, str],
        outputs: dict[int, Connection],
        call: bytes,
    ) -> None:
        args = (outputs, _describe_logging(), call)
        super().__init__(rank, env, ["torch", "ddpkit"], _run_rank, *args)
        self.done = False
        self.result: Any = None
        self.error: BaseException | None = None

    def receive(self) -> None:
        """Receive one message from the rank: a record for the log, or the result of the call."""
        message = self.next_message()
        if isinstance(message, dict):
            record = logging.makeLogRecord(message)
            logging.getLogger(record.name).handle(record)
            return
        self.done = True
        if message is None:
            ending = describe_exit(self.process)
            self.error = PeerError(self.rank, socket.gethostname(), "lost", ending)
        else:
            self.error, self.result = open_reply(self.rank, message)

    def end(self) -> None:
        """End the process, at once if it has not reported yet."""
        if not self.done:
            self.process.kill()
        self.process.join(_EXITING)  # it still flushes its output and ends its helper processes
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.close()  # the rank exits when this pipe closes


def _results(ranks: list[_SpawnedRank], timeout: timedelta, end_together: bool) -> list[Any]:
    """Wait for all ranks and return their results, or raise the error of the first that failed."""
    errors = _wait_for_all(ranks, timeout, end_together)
    if errors and (end_together or len(errors) == len(ranks)):
        raise first_cause(errors)
    unfinished = [process for process in ranks if not process.done]
    if unfinished:
        stacks = "\n".join(f"rank {each.rank}:\n{each.read_stack()}" for each in unfinished)
        raise TimeoutError(f"spawn() ended after {timeout}; not finished:\n{stacks}")
    return [process.error or process.result for process in ranks]


def _wait_for_all(
    ranks: list[_SpawnedRank],
    timeout: timedelta,
    end_together: bool,
) -> list[tuple[int, BaseException]]:
    """Receive the ranks' messages until all are done or the time is up; return their errors in order of arrival."""
    deadline = time.monotonic() + timeout.total_seconds()
    errors: list[tuple[int, BaseException]] = []
    while True:
        unfinished = [process for process in ranks if not process.done]
        if not unfinished:
            return errors
        ready = wait_for_messages(unfinished, deadline)
        if not ready:
            return errors
        for process in ready:
            process.receive()
            if process.error is not None:
                errors.append((process.rank, process.error))
            if process.error is not None and end_together:
                deadline = min(deadline, time.monotonic() + _AFTER_FAILURE)


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
    threading.Thread(target=_exit_with_parent, args=(pipe,), daemon=True).start()
    reply = call_and_reply(call)
    lifecycle.teardown()
    forwarder.uninstall()
    pipe.send(reply)


def _exit_with_parent(pipe: Connection) -> None:
    with suppress(OSError):
        pipe.poll(None)
    os._exit(1)


# Forward the output of ranks where a notebook or a test has replaced the streams.


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
    """Describe this process's logging for its ranks: levels, and which loggers have handlers."""
    known = {"": logging.root} | logging.root.manager.loggerDict
    loggers = {name: logger for name, logger in known.items() if isinstance(logger, logging.Logger)}
    return {
        "levels": {name: logger.level for name, logger in loggers.items() if logger.level},
        "with_handlers": [name for name, logger in loggers.items() if _has_handler(logger)],
        "disable": logging.root.manager.disable,
    }


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
        for name, level in parent["levels"].items():
            logging.getLogger(name).setLevel(level)
        logging.disable(parent["disable"])
        for name in parent["with_handlers"]:
            logger = logging.getLogger(name)
            if not _has_handler(logger):
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
