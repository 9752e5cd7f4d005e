"""Start a rank's process, ask for its stack, and describe its end: shared with `testing`."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, TextIO, TypeVar

from ..errors import PeerError

R = TypeVar("R", bound="RankProcess")
_STACK_SIGNAL = signal.SIGUSR2
_STACK_POLLS = 100  # how often to look for a stack; a loaded machine may be slow to write it
_STACK_PAUSE = 0.03  # seconds between two looks


def rank_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Build the environment variables of a rank on this node, which joins the store at `port`."""
    env = {key: text for key, text in os.environ.items() if not key.startswith("TORCHELASTIC_")}
    return env | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "DDPKIT_SPAWN": "1",
        # torch's own init joins the store, too, and hosts none
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def replace_environment(env: dict[str, str]) -> None:
    """Replace this process's environment variables."""
    os.environ.clear()
    os.environ.update(env)


def forget_start_method() -> None:
    """Let a loader's workers start in the user's default way, not in the way this process did."""
    multiprocessing.set_start_method(None, force=True)


def write_stack_on_request(file: TextIO) -> None:
    """Write the main thread's stack to an open file whenever the parent calls `RankProcess.read_stack`."""
    faulthandler.register(_STACK_SIGNAL, file=file, all_threads=False)


class RankProcess:
    """The process of one rank, and the pipe to it.

    Args:
        rank: The rank's number.
        preload: Modules that its forkserver imports.
        stack_file: The file that the rank gives to `write_stack_on_request`.
        main: Called in the process, with the rank's end of the pipe.
        *args: More arguments for it.
    """

    def __init__(
        self,
        rank: int,
        preload: list[str],
        stack_file: Path,
        main: Callable[..., None],
        *args: Any,
    ) -> None:
        self.rank = rank
        self._stack_file = stack_file
        stack_file.touch()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(preload)
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=main, args=(theirs, *args), name=f"rank {rank}")
        self.process.start()
        theirs.close()

    def next_message(self) -> Any:
        """Receive a message, None if the rank has died."""
        try:
            if not self.pipe.poll():  # it has died, and a child of its holds the pipe
                return None
            return self.pipe.recv()
        except (EOFError, OSError):
            return None

    def read_stack(self) -> str:
        """Ask the rank for its stack; return "" if it does not answer."""
        with suppress(ProcessLookupError):  # it has just ended
            os.kill(self.process.pid or 0, _STACK_SIGNAL)
        text = ""
        before: str | None = None
        for _ in range(_STACK_POLLS):  # it is written line by line
            text = self._stack_file.read_text()
            if text and text == before:
                break
            before = text
            time.sleep(_STACK_PAUSE)
        return text


def wait_for_messages(ranks: list[R], deadline: float) -> list[R]:
    """Return the ranks that have said something or died, none if the time is up before."""
    sources: dict[Any, R] = {}
    for rank in ranks:
        sources[rank.pipe] = rank
        sources[rank.process.sentinel] = rank  # a child of its may hold the pipe
    ready = wait([*sources], timeout=max(0.0, deadline - time.monotonic()))
    return list(dict.fromkeys(sources[source] for source in ready))


def describe_exit(process: Any) -> str:
    """Wait for a process to end and say how: "killed by SIGKILL", or "exited with code 1"."""
    process.join()
    code = process.exitcode
    if -code in set(signal.Signals):
        return f"killed by {signal.Signals(-code).name}"
    if code < 0:
        return f"killed by signal {-code}"
    return f"exited with code {code}"


def first_cause(errors: Sequence[tuple[int, BaseException]]) -> BaseException:
    """Choose the first of some ranks' errors that does not only report the failure of another rank."""
    _, error = min(errors, key=_is_echo)
    return error


def _is_echo(entry: tuple[int, BaseException]) -> bool:
    rank, error = entry
    return isinstance(error, PeerError) and error.rank != rank
