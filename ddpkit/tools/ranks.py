"""Start the ranks of a script, read what they record, and end them with all that they have started."""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import json
import os
import random
import runpy
import select
import shutil
import signal
import sys
import tempfile
import time
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch.nn.modules import module as hooks

from .. import LaunchError, detect_launch
from ..errors import message_of
from ..launch import detection
from ..launch.process_tree import child_processes
from ..rendezvous.store import host_on
from ..spawning import describe_exit, rank_environment, replace_environment
from .cli import UnfitScriptError, positive_seconds
from .joining import await_first_rank, call_as_spawned, tell_others
from .recorder import Record, Recorder
from .where import request_stack

Body = Callable[[Recorder, int], int]  # what a rank does; see `Ranks`
_STACK_SIGNAL = signal.SIGUSR2
_SET_PDEATHSIG = 1
_SET_CHILD_SUBREAPER = 36
_OF_ONE_NODE = {
    **dict.fromkeys(("GROUP_RANK", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"), "0"),
    "GROUP_WORLD_SIZE": "1",
    "ROLE_NAME": "default",
    "TORCHELASTIC_RUN_ID": "none",
}
_CHUNK = 1 << 16
_PAUSE = 0.01  # seconds in which more may come: a reader that wakes for each record takes the ranks' cores
_ENDING = 10.0  # seconds in which killed processes disappear


class Rank:
    """The process of one rank.

    Attributes:
        number: Its number.
        pid: Of the process.
        records: Its records so far.
        ended: How the process ended, None while it runs.
        reader: Of the pipe through which it tells records.
        end: Of the pipe through which it gets its port, and then, when it is closed, learns that it shall end.
    """

    def __init__(self, number: int, folder: Path) -> None:
        self.number = number
        self.pid = 0
        self.records: list[Record] = []
        self.ended: str | None = None
        self.output = folder / f"output-{number}"
        self._stacks = folder / f"stack-{number}"
        self._unread = b""
        self.reader, self._records = os.pipe()
        os.set_blocking(self.reader, False)
        self._control, self.end = os.pipe()

    def start(self, body: Body, env: dict[str, str], others: list[Rank]) -> None:
        """Fork the process, which shares the imported torch with this one."""
        output = os.open(self.output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        stacks = os.open(self._stacks, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid:
            for descriptor in (output, stacks, self._records, self._control):
                os.close(descriptor)
            return
        code = 1
        try:
            os.setsid()
            _prctl(_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)
            for rank in (*others, self):
                for descriptor in (rank.reader, rank.end):
                    os.close(descriptor)
            _take_over(env, output)
            os.environ["MASTER_PORT"] = os.read(self._control, _CHUNK).decode()
            faulthandler.register(_STACK_SIGNAL, file=stacks, all_threads=False)
            code = body(Recorder(self._records), self._control)
        finally:
            os._exit(code)

    def read(self) -> list[Record]:
        """Read what has come, without waiting."""
        with suppress(BlockingIOError):
            while data := os.read(self.reader, _CHUNK):
                self._unread += data
        *lines, self._unread = self._unread.split(b"\n")
        new: list[Record] = []
        for line in lines:
            with suppress(ValueError):  # it was not written to its end
                new.append(json.loads(line))
        self.records += new
        return new

    def reap(self, wait: bool = False) -> None:
        """Look if the process has ended."""
        if self.ended is not None:
            return
        deadline = time.monotonic() + _ENDING
        while True:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.ended = describe_exit(os.waitstatus_to_exitcode(status)).replace("killed", "was killed")
            if pid or not wait or time.monotonic() > deadline:
                return
            time.sleep(0.01)

    def read_stack(self) -> str:
        """Request the stack of the main thread."""
        return request_stack(self.pid, _STACK_SIGNAL, self._stacks)

    def tail(self) -> list[str]:
        """Return the last lines of the output."""
        text = self.output.read_text(errors="replace")
        return [line for line in text.splitlines() if line.strip()][-6:]

    def kill(self) -> None:
        """Kill the process, and those of its session."""
        for end in (os.killpg, os.kill):
            with suppress(ProcessLookupError, PermissionError):
                end(self.pid, signal.SIGKILL)


def _take_over(env: dict[str, str], output: int) -> None:
    """Make a forked process look like one that a launcher has started."""
    replace_environment(env)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    for stream, number in (("stdout", 1), ("stderr", 2)):
        text = os.fdopen(number, "w", buffering=1, errors="backslashreplace", closefd=False)
        setattr(sys, stream, text)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(detection.number(env["OMP_NUM_THREADS"]) or 1)
    random.seed()  # as in any new process: two ranks that do not seed them have other numbers
    np.random.seed()


def _prctl(option: int, value: int) -> None:
    """Set an attribute of this process that Linux knows."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def prepare(args: argparse.Namespace) -> None:
    """Look if the script can be run, and let SIGTERM end this process as an exception does, with what it has begun.

    Raises:
        UnfitScriptError: If there is no such script, or a launcher has started this process.
    """
    try:
        launch = detect_launch()
    except LaunchError as error:
        raise UnfitScriptError(str(error)) from None
    if launch.world_size > 1:
        raise UnfitScriptError("it starts ranks itself, -n of them: start it once, without a launcher.")
    if not args.module and not os.path.isfile(args.script):
        raise UnfitScriptError(f"{args.script}: there is no such file.")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


class Ranks:
    """The ranks of this machine: a context that leaves no process behind.

    Args:
        body: Runs the script in a rank's process, and returns its exit code. It gets a recorder, and a descriptor that
            becomes readable when the process shall end.
        number: Of ranks.
        device: "cpu" hides the GPUs.

    Attributes:
        all: The ranks of this machine.
        hides_gpus: Whether the GPUs are hidden.
    """

    def __init__(self, body: Body, number: int, device: str) -> None:
        self.hides_gpus = device == "cpu"
        self._folder = Path(tempfile.mkdtemp(prefix="ddpkit-ranks-"))  # no context, which a rank would end as well
        self._environments = [_environment(rank, number, device) for rank in range(number)]
        self._body = body
        self._not_ours = set(child_processes())
        self.all: list[Rank] = []

    def __enter__(self) -> Ranks:
        _prctl(_SET_CHILD_SUBREAPER, 1)
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            for number, env in enumerate(self._environments):
                rank = Rank(number, self._folder)
                rank.start(self._body, env, self.all)
                self.all.append(rank)
            self._store = host_on("127.0.0.1")  # only now, for it has threads
            for rank in self.all:
                with suppress(BrokenPipeError):
                    os.write(rank.end, str(self._store.port).encode())
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for rank in self.all:
            if rank.ended is None:
                rank.kill()
                rank.reap(wait=True)
            for descriptor in (rank.reader, rank.end):
                os.close(descriptor)
        _kill_orphans(self._not_ours)
        shutil.rmtree(self._folder, ignore_errors=True)

    def wait(self, seconds: float) -> Iterator[tuple[Rank, Record]]:
        """Wait for records, at most so long, and yield them with their ranks."""
        running = {rank.reader: rank for rank in self.all if rank.ended is None}
        select.select([*running], [], [], seconds)
        time.sleep(_PAUSE)
        for rank in running.values():
            rank.reap()
            for record in rank.read():
                yield rank, record


def _environment(rank: int, number: int, device: str) -> dict[str, str]:
    """Build the environment that torchrun would set for a rank of one node; the port is added later.

    Args:
        rank: The rank.
        number: Of all ranks.
        device: "cpu" hides the GPUs.
    """
    env = rank_environment(rank, number, port=0) | _OF_ONE_NODE
    env |= {"ROLE_RANK": env["RANK"], "ROLE_WORLD_SIZE": env["WORLD_SIZE"]}
    del env["DDPKIT_SPAWN"]
    env.setdefault("OMP_NUM_THREADS", "1")
    if device == "cpu":
        env |= {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}  # without it, accelerate starts no group
    return env


def _kill_orphans(others: set[int]) -> None:
    """Kill what the ranks have started and left, which the kernel has given to this process."""
    deadline = time.monotonic() + _ENDING
    while time.monotonic() < deadline:
        children = set(child_processes()) - others
        if not children:
            return
        for pid in children:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.01)


# Run a script as the main program of a rank's process.


@dataclass
class Script:
    """A training script and its command line.

    Attributes:
        path: Of its file, or the name of a module.
        arguments: Of its command line.
        is_module: Whether it is run as `python -m` does.
        home: The folder in which modules are looked for first; the present one by default.
    """

    path: str
    arguments: list[str]
    is_module: bool = False
    home: str = field(default_factory=os.getcwd)


FOLDER = "{folder}"  # in an argument of the script: the folder of a run, where a tool makes several


def add_script(parser: argparse.ArgumentParser, note: str) -> None:
    """Declare the flags of tools that run a script, and the script with its own arguments."""
    add = parser.add_argument
    silence = "bound on a time in which nothing happens (180)"
    add("--timeout", type=positive_seconds, default=180.0, metavar="SECONDS", help=silence)
    add("--device", choices=("cpu", "cuda"), default="cpu", help="hide the GPUs from the script, or do not (cpu)")
    add("--json", action="store_true", help="print one JSON object instead of text")
    add("-m", "--module", action="store_true", help="the script is the name of a module, as for `python -m`")
    add("script", help=f"the training script; what follows is its own{note}")
    add("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def run_script(script: Script) -> tuple[int, BaseException | None]:
    """Run a script to its end; return its exit code and the exception, already shown, that it has not caught."""
    failure = None
    code = 0
    try:
        _run_as_main(script)
    except SystemExit as end:
        code = _exit_code(end)
    except BaseException as error:
        failure = error
        code = 1
        sys.excepthook(type(error), error, error.__traceback__)
    tell_others()
    return code, failure


def _run_as_main(script: Script) -> None:
    """Run a file as `python FILE` does, or a module as `python -m MODULE` does."""
    sys.argv = [script.path, *script.arguments]
    warnings.resetwarnings()
    hooks._has_any_global_hook = lambda: False  # of an observer: torch.compile would warn of it
    if script.is_module:
        sys.path[0] = script.home
        runpy.run_module(script.path, run_name="__main__", alter_sys=True)
        return
    sys.path[0] = os.path.dirname(os.path.abspath(script.path))
    source = Path(script.path).read_bytes()
    task = await_first_rank(source)
    code = compile(source, script.path, "exec")
    main = types.ModuleType("__mp_main__" if task else "__main__")
    main.__file__ = script.path
    main.__builtins__ = __builtins__  # type: ignore[attr-defined]
    sys.modules["__main__"] = sys.modules[main.__name__] = main
    exec(code, vars(main))
    if task:
        call_as_spawned(task)


def describe(error: BaseException | None) -> str:
    """Write an exception on one line, without notes and details, "" for none."""
    if error is None:
        return ""
    first = message_of(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first}".removesuffix(": ")


def _exit_code(end: SystemExit) -> int:
    if isinstance(end.code, int):
        return end.code
    if end.code is None:
        return 0
    print(end.code, file=sys.stderr)
    return 1
