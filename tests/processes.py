"""Starts processes with environments of the test's choice, as a launcher would; torch is imported only once."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CLEAN = {k: v for k, v in os.environ.items() if k in ("PATH", "HOME", "TMPDIR", "LANG")}


@dataclass
class Ended:
    """How a process ended; exit code None if it had to be killed when the time was up."""

    code: int | None
    output: str
    seconds: float


def free_port() -> int:
    """A port that nobody listens on; another process may take it, so tests keep the time until its use short."""
    with socket.create_server(("127.0.0.1", 0)) as door:
        return int(door.getsockname()[1])


def platform_env(rank: int, world_size: int, port: int, **more: str) -> dict[str, str]:
    """What a platform that starts the ranks itself sets."""
    env = {"RANK": f"{rank}", "WORLD_SIZE": f"{world_size}", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}"}
    return env | {"OMP_NUM_THREADS": "1"} | more


def run(
    fn: Callable[..., Any],
    envs: list[dict[str, str]],
    *args: Any,
    timeout: float = 60.0,
    delays: list[float] | None = None,
) -> list[Ended]:
    """Runs `fn(*args)` as the main program of a process for each environment; `delays` in seconds before each start."""
    with tempfile.TemporaryDirectory() as folder:
        start, crew = time.monotonic(), []
        for number, env in enumerate(envs):
            time.sleep(delays[number] if delays else 0)
            crew.append(begin(fn, env, *args, output=f"{folder}/{number}"))
        ended = [_wait(process, start, timeout) for process in crew]
        outputs = [Path(f"{folder}/{number}").read_text() for number in range(len(envs))]
        return [Ended(code, output, seconds) for (code, seconds), output in zip(ended, outputs, strict=True)]


def begin(fn: Callable[..., Any], env: dict[str, str], *args: Any, output: str) -> Any:
    """Starts `fn(*args)` as the main program of a new process; what it prints goes to the file `output`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "ddpkit"])
    process = context.Process(target=_main, args=(fn, args, CLEAN | env, output))
    process.start()
    return process


def _wait(process: Any, start: float, timeout: float) -> tuple[int | None, float]:
    process.join(max(0.0, start + timeout - time.monotonic()))
    seconds, code = time.monotonic() - start, process.exitcode
    if code is None:
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    return code, seconds


def _main(fn: Callable[..., Any], args: tuple[Any, ...], env: dict[str, str], output: str) -> None:
    os.environ.clear()
    os.environ.update(env)
    multiprocessing.set_start_method(None, force=True)  # the default, for a loader's workers
    with open(output, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", closefd=False)
    code = 0
    try:
        fn(*args)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:  # what the interpreter does at the end of a script
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
