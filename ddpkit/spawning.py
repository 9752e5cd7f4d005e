"""Launches ranks from Python, for tests and scripts: real processes, joined as torchrun's workers are."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import signal
import socket
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch.distributed as dist

from . import runtime
from .errors import DdpkitError, PeerError

_GRACE = 10.0  # seconds that the other ranks get to report after the first failure


def spawn(fn: Callable[..., Any], nprocs: int, *args: Any, timeout: timedelta = timedelta(minutes=10)) -> list[Any]:
    """Runs `fn(*args)` in `nprocs` new processes of one job and returns what each returned.

    `fn` is what a script's `main()` is under torchrun: it calls `setup()` or `distributed()` itself. In a script, call
    `spawn` under `if __name__ == "__main__":`.

    Args:
        fn: A function that can be pickled: defined at the top of a module.
        nprocs: Number of processes, at least 1.
        *args: Passed to every rank as copies; tensors are not shared.
        timeout: Bound on the whole run.

    Returns:
        The ranks' results, by rank.

    Raises:
        Exception: The exception of the rank that failed first, its rank and traceback in `__cause__`, a `PeerError`.
        PeerError: If a process died without an exception, or the exception cannot be pickled.
        TimeoutError: If the time is up; the message holds every unfinished rank's stack.

    Example:
        >>> spawn(divmod, 2, 7, 2)
        [(3, 1), (3, 1)]
    """
    if not isinstance(nprocs, int) or nprocs < 1:
        raise ValueError(f"nprocs must be a positive integer, got {nprocs!r}.")
    try:
        job = pickle.dumps((fn, args))  # plain pickle copies tensors; multiprocessing's own would share them
    except Exception as error:
        raise TypeError(f"spawn() cannot send {fn!r} and its arguments to other processes: {error}") from error
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "ddpkit"])
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    crew: list[_Worker] = []
    with tempfile.TemporaryDirectory(prefix="ddpkit-spawn-") as folder:
        try:
            for rank in range(nprocs):
                crew.append(_Worker(context, rank, nprocs, store.port, job, Path(folder, str(rank))))
            return _collect(crew, time.monotonic() + timeout.total_seconds(), timeout)
        finally:
            for worker in crew:
                worker.end()


class _Worker:
    def __init__(self, context: Any, rank: int, nprocs: int, port: int, job: bytes, stack: Path) -> None:
        self.rank, self.stack = rank, stack
        self.outcome: tuple[str, Any, str] | None = None
        self.pipe, theirs = context.Pipe()
        stack.touch()
        env = {k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC_")}
        env |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": f"{nprocs}", "LOCAL_WORLD_SIZE": f"{nprocs}"}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}", "DDPKIT_SPAWN": "1"}
        self.process = context.Process(target=_work, args=(theirs, job, env, str(stack)), name=f"rank {rank}")
        self.process.start()
        theirs.close()

    def receive(self) -> None:
        try:
            if not self.pipe.poll():  # it has ended, and a child of its holds the pipe
                raise EOFError
            self.outcome = pickle.loads(self.pipe.recv_bytes())
        except (EOFError, ConnectionError):
            self.process.join()
            code = self.process.exitcode
            how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
            self.outcome = ("lost", PeerError(self.rank, socket.gethostname(), "lost", how), "")

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
        raise _error(min(failed, key=_is_echo))
    if waiting:
        places = "\n".join(worker.where() for worker in waiting.values())
        raise TimeoutError(f"spawn() ended after {timeout}; not finished:\n{places}")
    return [worker.outcome[1] for worker in crew if worker.outcome]


def _is_echo(worker: _Worker) -> bool:
    return worker.outcome is not None and isinstance(worker.outcome[1], PeerError)


def _error(worker: _Worker) -> BaseException:
    kind, error, text = worker.outcome or ("", None, "")
    if kind == "raised" and isinstance(error, BaseException):
        error.__cause__ = PeerError(worker.rank, socket.gethostname(), type(error).__name__, str(error), text)
    return error if isinstance(error, BaseException) else DdpkitError(text)


def _work(pipe: Connection, job: bytes, env: dict[str, str], stack: str) -> None:
    os.environ.clear()
    os.environ.update(env)
    multiprocessing.set_start_method(None, force=True)  # for loader workers: the user's default, not what started us
    with open(stack, "w") as file:
        faulthandler.register(signal.SIGUSR2, file=file, all_threads=False)
        threading.Thread(target=_exit_with_parent, args=(pipe,), daemon=True).start()
        try:
            fn, args = pickle.loads(job)
            reply = pickle.dumps(("returned", fn(*args), ""))
        except BaseException as error:
            ended = isinstance(error, SystemExit) and not error.code
            reply = pickle.dumps(("returned", None, "")) if ended else _failure(runtime.report(error))
        runtime.teardown()
        pipe.send_bytes(reply)


def _failure(error: BaseException) -> bytes:
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    if isinstance(error, Exception):  # SystemExit would end the caller
        with suppress(Exception):
            reply = pickle.dumps(("raised", error, text))
            pickle.loads(reply)
            return reply
    rank, host = int(os.environ["RANK"]), socket.gethostname()
    return pickle.dumps(("raised", PeerError(rank, host, type(error).__name__, str(error), text), text))


def _exit_with_parent(pipe: Connection) -> None:
    try:
        pipe.poll(None)
    except OSError:
        pass
    os._exit(1)
