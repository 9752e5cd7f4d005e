"""Launches ranks from Python, for tests and scripts: real processes, joined as torchrun's workers are."""

from __future__ import annotations

import faulthandler
import importlib
import io
import multiprocessing
import operator
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing import process
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, TypeVar

import torch.distributed as dist

from ..errors import DdpkitError, PeerError
from ..process_group import lifecycle
from ..process_group.on_failure import ended_well
from ..process_group.polling import check_timeout
from ..process_group.session import message_of, trace_of
from .output import Copier, Forwarder, handle_record, logging_of_parent, own_streams, redirect

T = TypeVar("T")
_GRACE = 10.0  # seconds that the other ranks get to report after the first failure


def spawn(fn: Callable[..., T], nprocs: int, *args: Any, timeout: timedelta = timedelta(minutes=10)) -> list[T]:
    """Run `fn(*args)` in `nprocs` new processes of one job and return what each returned.

    `fn` is what a script's `main()` is under torchrun: it calls `setup()` or `distributed()` itself. In a script, call
    `spawn` under `if __name__ == "__main__":`.

    Where this process has configured logging, the ranks' records come to its handlers, with the rank in `record.rank`.
    What ranks print comes to its `sys.stdout` and `sys.stderr`, also in a notebook.

    Args:
        fn: A function that can be pickled: defined at the top of a module. Where cloudpickle is installed also a
            lambda, an inner function, or one of a notebook.
        nprocs: Number of processes, at least 1.
        *args: Passed to every rank as copies; tensors are not shared.
        timeout: Bound on the whole run.

    Returns:
        The ranks' results, by rank.

    Raises:
        Exception: The exception of the rank that failed first, its rank and traceback in `__cause__`, a `PeerError`.
        PeerError: If a process died without an exception, or the exception cannot be pickled.
        TimeoutError: If the time is up; the message holds every unfinished rank's stack.
        TypeError: If `fn` or an argument cannot be sent to other processes; before any is started.

    Example:
        >>> spawn(divmod, 2, 7, 2)
        [(3, 1), (3, 1)]
    """
    nprocs = _count(nprocs)
    check_timeout(timeout)
    job = _dump_job(fn, args)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "ddpkit"])
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    copier = Copier(own_streams())
    crew: list[_Worker] = []
    with tempfile.TemporaryDirectory(prefix="ddpkit-spawn-") as folder:
        try:
            with _without_false_file():
                for rank in range(nprocs):
                    crew.append(_Worker(context, rank, nprocs, store.port, job, Path(folder, str(rank)), copier))
            copier.start()
            return _collect(crew, time.monotonic() + timeout.total_seconds(), timeout)
        finally:
            for worker in crew:
                worker.end()
            copier.close()


def _count(nprocs: Any) -> int:
    try:
        count = operator.index(nprocs)
    except TypeError:
        count = 0
    if count < 1:
        raise ValueError(f"nprocs must be a positive integer, got {nprocs!r}.")
    return count


def _dump_job(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    try:
        return _dump((fn, args))
    except Exception as error:
        raise TypeError(
            f"spawn() cannot send {fn!r} and its arguments to other processes: {message_of(error)}. Put it at the top "
            "of a module and import it from there. Lambdas, inner functions and what a notebook defines can be sent "
            "where cloudpickle is installed: pip install cloudpickle."
        ) from error


def _dump(value: Any) -> bytes:
    """Pickle by name where the other process can import the name, else by value."""
    data = io.BytesIO()
    try:  # plain pickle copies tensors; multiprocessing's own would share them
        _Pickler(data).dump(value)
        return data.getvalue()
    except Exception:
        with suppress(ImportError):
            return bytes(importlib.import_module("cloudpickle").dumps(value))
        raise


class _Pickler(pickle.Pickler):
    """Refuses what was defined in a main program that other processes cannot import, as a notebook is."""

    def reducer_override(self, obj: Any) -> Any:
        named = isinstance(obj, (type, FunctionType))
        if named and obj.__module__ == "__main__" and not _can_import(sys.modules["__main__"]):
            raise pickle.PicklingError(f"{obj.__qualname__} was defined in a notebook, at a prompt or on stdin")
        return NotImplemented


def _can_import(main: ModuleType) -> bool:
    """Say whether another process can import the main program: a file or a module, and no notebook."""
    return main.__spec__ is not None or _has_file(main)


def _has_file(main: ModuleType) -> bool:
    file = getattr(main, "__file__", None)
    return file is not None and os.path.exists(os.path.join(getattr(process, "ORIGINAL_DIR", None) or "", file))


@contextmanager
def _without_false_file() -> Iterator[None]:
    """Let processes start from a program on stdin: multiprocessing would look for a file named <stdin>."""
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    if file is None or _can_import(main):
        yield
        return
    del main.__file__
    try:
        yield
    finally:
        main.__file__ = file


class _Worker:
    def __init__(
        self, context: Any, rank: int, nprocs: int, port: int, job: bytes, stack: Path, copier: Copier
    ) -> None:
        self.rank, self.stack = rank, stack
        self.outcome: tuple[str, Any] | None = None
        self.pipe, theirs = context.Pipe()
        stack.touch()
        env = {k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC_")}
        env |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": f"{nprocs}", "LOCAL_WORLD_SIZE": f"{nprocs}"}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}", "DDPKIT_SPAWN": "1"}
        env["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # torch's own init joins the store, too, and hosts none
        outputs = copier.pipes()
        theirs_all = (theirs, outputs, logging_of_parent())
        self.process = context.Process(target=_work, args=(*theirs_all, job, env, str(stack)), name=f"rank {rank}")
        self.process.start()
        for end in (theirs, *outputs.values()):
            end.close()

    def receive(self) -> None:
        """Take one message from the rank: a record for the log, or how it ended."""
        try:
            if not self.pipe.poll():  # it has ended, and a child of its holds the pipe
                raise EOFError
            kind, *parts = pickle.loads(self.pipe.recv_bytes())
        except (EOFError, ConnectionError):
            self.process.join()
            code = self.process.exitcode
            how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
            self.outcome = ("lost", self._failure("lost", how))
            return
        if kind == "logged":
            handle_record(*parts)
        elif kind == "returned":
            self.outcome = self._returned(*parts)
        else:
            self.outcome = self._raised(*parts)

    def _returned(self, data: bytes) -> tuple[str, Any]:
        try:
            return "returned", pickle.loads(data)
        except (Exception, SystemExit) as error:
            words = f"what it returned cannot be unpickled here: {message_of(error)}"
            return "raised", self._failure(type(error).__name__, words)

    def _raised(self, data: bytes, name: str, message: str, trace: str) -> tuple[str, Any]:
        cause = self._failure(name, message, trace)
        with suppress(Exception, SystemExit):
            error = pickle.loads(data)
            if isinstance(error, Exception):  # SystemExit would end the caller
                error.__cause__ = cause
                return "raised", error
        return "raised", cause

    def _failure(self, name: str, message: str, trace: str = "") -> PeerError:
        return PeerError(self.rank, socket.gethostname(), name, message, trace)

    def where(self) -> str:
        with suppress(ProcessLookupError):  # it has just ended
            os.kill(self.process.pid, signal.SIGUSR2)
        text, before = "", None
        for _ in range(100):  # line by line; a loaded machine may be slow
            text = self.stack.read_text()
            if text and text == before:
                break
            before = text
            time.sleep(0.03)
        return f"rank {self.rank}:\n{text or '  (no answer: stopped?)'}"

    def end(self) -> None:
        if self.outcome is None:
            self.process.kill()
        self.process.join(_GRACE)  # it has yet to flush its output and to end its own helpers
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.pipe.close()  # the worker's lifeline: it exits when this closes


def _collect(crew: list[_Worker], deadline: float, timeout: timedelta) -> list[Any]:
    failed: list[_Worker] = []
    while waiting := {worker.pipe: worker for worker in crew if worker.outcome is None}:
        ends = {worker.process.sentinel: worker for worker in waiting.values()}  # a child of its may hold the pipe
        ready = wait([*waiting, *ends], timeout=max(0.0, deadline - time.monotonic()))
        for worker in {(waiting | ends)[thing] for thing in ready}:
            worker.receive()
            if worker.outcome and worker.outcome[0] != "returned":
                failed.append(worker)
                deadline = min(deadline, time.monotonic() + _GRACE)
        if not ready:
            break
    if failed:
        first = min(failed, key=_is_echo)
        raise first.outcome[1] if first.outcome else DdpkitError("")
    if waiting:
        places = "\n".join(worker.where() for worker in waiting.values())
        raise TimeoutError(f"spawn() ended after {timeout}; not finished:\n{places}")
    return [worker.outcome[1] for worker in crew if worker.outcome]


def _is_echo(worker: _Worker) -> bool:
    """Return whether a rank failed only because another did."""
    error = worker.outcome[1] if worker.outcome else None
    return isinstance(error, PeerError) and error.rank != worker.rank


def _work(
    pipe: Connection,
    outputs: dict[int, Connection],
    parent_logging: dict[str, Any],
    job: bytes,
    env: dict[str, str],
    stack: str,
) -> None:
    os.environ.clear()
    os.environ.update(env)
    multiprocessing.set_start_method(None, force=True)  # for loader workers: the user's default, not what started us
    redirect(outputs)
    rank, world_size = int(env["RANK"]), int(env["WORLD_SIZE"])
    forwarder = Forwarder(rank, world_size, lambda fields: pipe.send_bytes(pickle.dumps(("logged", fields))))
    forwarder.install(parent_logging)
    with open(stack, "w") as file:
        faulthandler.register(signal.SIGUSR2, file=file, all_threads=False)
        threading.Thread(target=_exit_with_parent, args=(pipe,), daemon=True).start()
        try:
            fn, args = pickle.loads(job)
            reply = ("returned", _dump(fn(*args)))
        except BaseException as error:
            reply = ("returned", _dump(None)) if ended_well(error) else _failure(lifecycle.report(error))
        lifecycle.teardown()
        forwarder.close()
        pipe.send_bytes(pickle.dumps(reply))


def _failure(error: BaseException) -> tuple[Any, ...]:
    data = b""
    with suppress(Exception, SystemExit):
        data = _dump(error)
    return "raised", data, type(error).__name__, message_of(error), trace_of(error)


def _exit_with_parent(pipe: Connection) -> None:
    try:
        pipe.poll(None)
    except OSError:
        pass
    os._exit(1)
