"""Starts processes with environments of the test's choice, as a launcher would; torch is imported only once."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import multiprocessing
import multiprocessing.forkserver
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpkit.testing.pool import PRELOADED

ROOT = Path(__file__).resolve().parents[1]
_START = ROOT / "tests" / "start"
_PATHS = os.environ.get("PYTHONPATH", "").split(os.pathsep)
if str(_START) not in _PATHS:  # what workers of xdist inherit has it
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_START), str(ROOT), *_PATHS]))
_KEPT = ("PATH", "PYTHONPATH", "HOME", "TMPDIR", "LANG", "RES_OPTIONS", "PYTHONPYCACHEPREFIX")
_KEPT += ("ATEN_CPU_CAPABILITY", "MKL_CBWR")  # by which sums are rounded
_KEPT += ("CUDA_VISIBLE_DEVICES",)  # conftest.py hides all
CLEAN = {k: v for k, v in os.environ.items() if k in _KEPT}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
_tried = itertools.count(random.SystemRandom().randrange(2_500))


@dataclass
class Ended:
    """How a process ended; exit code None if it had to be killed when the time was up."""

    code: int | None
    output: str
    seconds: float


def free_port() -> int:
    """A port that nobody listens on, from a range of this worker's own below that of outgoing connections."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % 8
    while True:
        port = 10_000 + 2_500 * worker + next(_tried) % 2_500
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            return port


def platform_env(rank: int, world_size: int, port: int, **more: str) -> dict[str, str]:
    """What a platform that starts the ranks itself sets."""
    env = {"RANK": f"{rank}", "WORLD_SIZE": f"{world_size}", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}"}
    return env | {"OMP_NUM_THREADS": "1"} | more


def run(
    fn: Callable[..., Any],
    envs: list[dict[str, str]],
    *args: Any,
    timeout: float = 300.0,
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


def launch(
    *commands: Sequence[str],
    env: dict[str, str] | None = None,
    timeout: float = 600.0,
    meanwhile: Callable[[list[subprocess.Popen[bytes]]], Any] = lambda crew: None,
) -> list[Ended]:
    """Runs commands side by side; calls `meanwhile` with their processes once they have started."""
    env = CLEAN | {"OMP_NUM_THREADS": "1"} | (env or {})
    start, crew, ended = time.monotonic(), [], []
    with contextlib.ExitStack() as stack:
        outputs = [stack.enter_context(tempfile.TemporaryFile()) for _ in commands]
        for command, output in zip(commands, outputs, strict=True):
            pipes = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
            crew.append(subprocess.Popen(command, env=env, start_new_session=True, **pipes))
            stack.callback(_end_all, crew[-1])
        meanwhile(crew)
        for process, output in zip(crew, outputs, strict=True):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, start + timeout - time.monotonic()))
            output.seek(0)
            ended.append(Ended(process.poll(), output.read().decode(), time.monotonic() - start))
    return ended


def _end_all(process: subprocess.Popen[bytes]) -> None:
    """Ends a launcher that is late in an orderly way, so that it ends its ranks; and whatever is left of it."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(40)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def import_once() -> None:
    """Start the process from which others are forked, with what takes long to import: torch, and what DDP imports."""
    multiprocessing.set_forkserver_preload([*PRELOADED, "pytest", "hypothesis", "xdist.scheduler", "freezing"])
    multiprocessing.forkserver.ensure_running()


def begin(fn: Callable[..., Any], env: dict[str, str], *args: Any, output: str) -> Any:
    """Starts `fn(*args)` as the main program of a new process; what it prints goes to the file `output`."""
    import_once()
    context = multiprocessing.get_context("forkserver")
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
    sys.stderr = os.fdopen(2, "w", errors="backslashreplace", closefd=False)  # as the interpreter opens it
    code = 0
    try:
        fn(*args)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:  # what the interpreter does at the end of a script
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    threading._shutdown()  # waits for threads, as the interpreter does
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
