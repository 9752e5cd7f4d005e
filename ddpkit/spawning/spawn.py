"""Launch ranks from Python: real processes, joined as torchrun's workers are."""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, TypeVar, overload

from ..arguments import as_integer, check_timeout
from ..errors import PeerError
from ..process_group import lifecycle
from ..process_group.tcp_store import host_on
from .output import Copier, Forwarder, describe_logging, handle_record, own_streams, redirect
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
