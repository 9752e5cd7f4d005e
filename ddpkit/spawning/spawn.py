"""Launch ranks from Python: real processes, joined as torchrun's workers are."""

from __future__ import annotations

import codecs
import copy
import logging
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal, TextIO, TypeVar, overload

from ..arguments import as_integer, check_timeout
from ..errors import PeerError
from ..job import lifecycle
from ..join.store import host_on
from ..logging import FORWARDED
from .pickling import call_and_reply, can_import, dump_call, open_reply
from .rank_process import (
    RankProcess,
    describe_exit,
    first_cause,
    forget_start_method,
    rank_environment,
    replace_environment,
    wait_for_messages,
    write_stack_on_request,
)

# Show the output and the log records of ranks in the process that launched them.

_CHUNK = 1 << 16  # bytes read at a time
_Decoder = codecs.getincrementaldecoder("utf-8")  # keeps half a character for the next time


def own_streams() -> dict[int, TextIO]:
    """Find the streams that a notebook or test put in the place of descriptors 1 and 2."""
    streams = {1: sys.stdout, 2: sys.stderr}
    own = {}
    for number, stream in streams.items():
        if stream and not _writes_to(stream, number):
            own[number] = stream
    return own


def _writes_to(stream: TextIO, number: int) -> bool:
    try:
        return stream.fileno() == number
    except (AttributeError, OSError, ValueError):  # a notebook's stream may have none
        return False


class Copier(threading.Thread):
    """Copy the output of other processes to this process's own streams, as it comes."""

    def __init__(self, streams: dict[int, TextIO]) -> None:
        super().__init__(name="ddpkit output", daemon=True)
        self._streams = streams
        self._outputs: dict[Connection, tuple[TextIO, codecs.IncrementalDecoder]] = {}
        self._ended, self._end = Pipe(duplex=False)

    def pipes(self) -> dict[int, Connection]:
        """Make the ends for one process to write to, by the descriptor which they replace there.

        Call it before `start`.
        """
        writers = {}
        for number, stream in self._streams.items():
            reader, writers[number] = Pipe(duplex=False)
            self._outputs[reader] = stream, _Decoder(errors="replace")
        return writers

    def run(self) -> None:
        """Copy until all writers have closed their ends, or `close` is called."""
        while self._outputs:
            ready = wait([*self._outputs, self._ended])
            for reader in ready:
                if reader in self._outputs:
                    self._copy(reader)
            if ready == [self._ended]:  # and nothing is left to read
                return

    def close(self) -> None:
        """Stop when all output is read; a process that lives on may hold an end open."""
        self._end.send_bytes(b"")
        was_started = self.ident is not None
        if was_started:
            self.join(5.0)
        for end in (*self._outputs, self._ended, self._end):
            end.close()

    def _copy(self, reader: Connection) -> None:
        stream, decoder = self._outputs[reader]
        data = os.read(reader.fileno(), _CHUNK)
        stream.write(decoder.decode(data, final=not data))
        stream.flush()
        if not data:
            del self._outputs[reader]
            reader.close()


def redirect(writers: dict[int, Connection]) -> None:
    """Let this process write to the ends that `Copier.pipes` has made."""
    if not writers:
        return
    for number, writer in writers.items():
        os.dup2(writer.fileno(), number)
        writer.close()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(line_buffering=True, write_through=False)  # by lines also under python -u


def describe_logging() -> dict[str, Any]:
    """Describe this process's logging for its ranks: levels, and which loggers have handlers."""
    loggers: dict[str, logging.Logger] = {"": logging.root}
    for name, logger in logging.root.manager.loggerDict.items():
        if isinstance(logger, logging.Logger):
            loggers[name] = logger
    return {
        "levels": {name: logger.level for name, logger in loggers.items() if logger.level},
        "with_handlers": [name for name, logger in loggers.items() if _has_handler(logger)],
        "disable": logging.root.manager.disable,
    }


def _has_handler(logger: logging.Logger) -> bool:
    return any(not isinstance(handler, logging.NullHandler) for handler in logger.handlers)


class Forwarder(logging.Handler):
    """Send records to the process that launched this rank, and to its handlers and filters.

    They travel as text, with added attributes if these are numbers or text.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        send: Callable[[dict[str, Any]], None],
    ) -> None:
        super().__init__()
        self._rank = rank
        self._world_size = world_size
        self._send = send
        self._pid = os.getpid()
        self._last: logging.LogRecord | None = None

    def install(self, parent: dict[str, Any]) -> None:
        """Log as the parent does, by its `describe_logging`.

        Loggers get its levels; those that have handlers there and none here get this one.
        """
        for name, level in parent["levels"].items():
            logging.getLogger(name).setLevel(level)
        logging.disable(parent["disable"])
        for name in parent["with_handlers"]:
            logger = logging.getLogger(name)
            if not _has_handler(logger):
                logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Send a copy of a record, once, as text."""
        if os.getpid() != self._pid:  # a loader's worker, which must not write to the pipe
            _handle_without_handler(record)
            return
        if record is self._last:  # it was sent from another logger on its way up
            return
        self._last = record
        try:
            self._send(self._pack(record))
        except Exception:
            self.handleError(record)

    def close(self) -> None:
        """Send no more: later records are for this process alone."""
        with self.lock or nullcontext():
            self._pid = 0
        super().close()

    def _pack(self, record: logging.LogRecord) -> dict[str, Any]:
        packed = copy.copy(record)
        packed.rank = self._rank
        packed.world_size = self._world_size
        setattr(packed, FORWARDED, True)
        packed.msg = record.getMessage()
        packed.args = None
        if record.exc_info and not record.exc_text:
            packed.exc_text = logging.Formatter().formatException(record.exc_info)
        fields = vars(packed).items()
        return {name: value for name, value in fields if isinstance(value, (str, int, float))}


def _handle_without_handler(record: logging.LogRecord) -> None:
    """Treat a record as logging does where no handler is installed."""
    last_resort = logging.lastResort
    if last_resort and record.levelno >= last_resort.level:
        last_resort.handle(record)


def handle_record(fields: dict[str, Any]) -> None:
    """Log a rank's record here."""
    record = logging.makeLogRecord(fields)
    logging.getLogger(record.name).handle(record)


T = TypeVar("T")
_AFTER_FAILURE = 10.0  # seconds that the other ranks get to report after the first failure
_EXITING = 10.0  # seconds in which a rank that has reported ends


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

    `fn` plays the part of a script's `main()` under torchrun: it calls `setup()` or
    `distributed()` itself. In a script, call `spawn` under `if __name__ == "__main__":`.

    Where this process has configured logging, the ranks' records come to its handlers, with the
    rank in `record.rank`. The ranks' output comes to its `sys.stdout` and `sys.stderr`, also in a
    notebook.

    Args:
        fn: A function that can be pickled: defined at the top of a module. Where cloudpickle is
            installed also a lambda, an inner function, or one of a notebook.
        nprocs: Number of processes, at least 1.
        *args: Passed to every rank as copies; tensors are not shared.
        timeout: Bound on the whole run.
        end_together: Whether the others are ended when a rank has failed. With False, for functions
            that `survive` the loss of ranks, they are waited for.

    Returns:
        The ranks' results, by rank; with `end_together=False`, the exception of a rank that failed
        in the place of its result.

    Raises:
        Exception: The exception of the rank that failed first, its rank and traceback in
            `__cause__`, a `PeerError`. With `end_together=False`, only if all failed.
        PeerError: If a process died without an exception, or the exception cannot be pickled.
        TimeoutError: If the time is up; the message holds every unfinished rank's stack.
        TypeError: If `fn` or an argument cannot be sent to other processes; before any is started.

    Example:
        >>> spawn(divmod, 2, 7, 2)
        [(3, 1), (3, 1)]
    """
    nprocs = as_integer(nprocs, "nprocs")
    check_timeout(timeout)
    call = dump_call("spawn", fn, args)
    store = host_on("127.0.0.1")
    copier = Copier(own_streams())
    ranks: list[_SpawnedRank] = []
    with tempfile.TemporaryDirectory(prefix="ddpkit-spawn-") as folder:
        try:
            with _main_program_of_child():
                for rank in range(nprocs):
                    env = rank_environment(rank, nprocs, store.port)
                    stack_file = Path(folder, str(rank))
                    ranks.append(_SpawnedRank(rank, call, env, stack_file, copier))
            copier.start()
            return _results(ranks, timeout, end_together)
        finally:  # also on Ctrl-C
            for process in ranks:
                process.end()
            copier.close()


@contextmanager
def _main_program_of_child() -> Iterator[None]:
    """Let a program on stdin start processes: multiprocessing would look for a file <stdin>."""
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
    """The process of one rank, and the result or error that it has reported.

    Attributes:
        done: True once it has returned, raised or died.
        result: The result of the function.
        error: The exception of the function, or a description of the process's death.
    """

    def __init__(
        self,
        rank: int,
        call: bytes,
        env: dict[str, str],
        stack_file: Path,
        copier: Copier,
    ) -> None:
        outputs = copier.pipes()
        args = (outputs, describe_logging(), call, env, str(stack_file))
        super().__init__(rank, ["torch", "ddpkit"], stack_file, _run_rank, *args)
        for end in outputs.values():
            end.close()
        self.done = False
        self.result: Any = None
        self.error: BaseException | None = None

    def receive(self) -> None:
        """Take one message from the rank: a record for the log, or the reply to the call."""
        message = self.next_message()
        if isinstance(message, dict):
            handle_record(message)
            return
        self.done = True
        if message is None:
            ending = describe_exit(self.process)
            self.error = PeerError(self.rank, socket.gethostname(), "lost", ending)
        else:
            self.error, self.result = open_reply(self.rank, message)

    def describe_stack(self) -> str:
        """Say where the rank is."""
        stack = self.read_stack() or "  (no answer: stopped?)"
        return f"rank {self.rank}:\n{stack}"

    def end(self) -> None:
        """End the process, at once if it has not reported yet."""
        if not self.done:
            self.process.kill()
        self.process.join(_EXITING)  # it has yet to flush its output and to end its own helpers
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.pipe.close()  # the rank's lifeline: it exits when this closes


def _results(ranks: list[_SpawnedRank], timeout: timedelta, end_together: bool) -> list[Any]:
    """Wait for all ranks and return their results, or raise the error of the first that failed."""
    errors = _wait_for_all(ranks, timeout, end_together)
    if errors and (end_together or len(errors) == len(ranks)):
        raise first_cause(errors)
    unfinished = [process for process in ranks if not process.done]
    if unfinished:
        stacks = "\n".join(process.describe_stack() for process in unfinished)
        raise TimeoutError(f"spawn() ended after {timeout}; not finished:\n{stacks}")
    return [process.error or process.result for process in ranks]


def _wait_for_all(
    ranks: list[_SpawnedRank],
    timeout: timedelta,
    end_together: bool,
) -> list[tuple[int, BaseException]]:
    """Take the ranks' messages until all are done or the time is up; return their errors as they come."""
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
    env: dict[str, str],
    stack_file: str,
) -> None:
    """Be one rank: call the function and report its result or error."""
    replace_environment(env)
    forget_start_method()
    redirect(outputs)
    forwarder = Forwarder(int(env["RANK"]), int(env["WORLD_SIZE"]), pipe.send)
    forwarder.install(parent_logging)
    with open(stack_file, "w") as file:
        write_stack_on_request(file)
        threading.Thread(target=_exit_with_parent, args=(pipe,), daemon=True).start()
        reply = call_and_reply(call)
        lifecycle.teardown()
        forwarder.close()
        pipe.send(reply)


def _exit_with_parent(pipe: Connection) -> None:
    with suppress(OSError):
        pipe.poll(None)
    os._exit(1)
