"""Be one rank of a checked script: install the observers, run the script, and report its end."""

from __future__ import annotations

import atexit
import faulthandler
import os
import runpy
import signal
import sys
import traceback
import types
import warnings
from dataclasses import dataclass
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from .ending import Ending
from .observing.collectives import Collectives
from .observing.files import Files
from .observing.losses import Losses
from .observing.modules import Modules
from .observing.patching import Function, before, replace, report_to
from .observing.random_numbers import Windows
from .observing.samples import Samples
from .observing.scaling import Scaling
from .observing.schedules import Schedules
from .observing.steps import Steps
from .places import is_own, place_of, stack
from .recorder import Recorder

STACK_SIGNAL = signal.SIGUSR2
_kept: list[Any] = []  # process groups, whose destructors may hang


@dataclass
class Script:
    """The script to check.

    Attributes:
        path: Of its file, or the name of a module.
        arguments: Of its command line.
        steps: The optimiser steps of an epoch.
        is_module: Whether it is run as `python -m` does.
    """

    path: str
    arguments: list[str]
    steps: int
    is_module: bool = False


def be_rank(script: Script, records: int, control: int, stacks: int) -> None:
    """Run the script as the main program of this process, and wait for the end.

    Args:
        script: The script.
        records: The descriptor to write records to.
        control: The descriptor that becomes readable when the process shall end.
        stacks: The descriptor to write the stack to, when the process is asked for it.
    """
    faulthandler.register(STACK_SIGNAL, file=stacks, all_threads=False)
    recorder = Recorder(records)
    ending = Ending(recorder, script.steps, control)
    observe(recorder, ending)
    failure = None
    code = 0
    try:
        run_as_main(script)
    except SystemExit as end:
        code = _exit_code(end)
    except BaseException as error:
        failure = error
    recorder.tell("end", code=code, error=_describe(failure), where=_places(failure))
    if failure is not None:
        sys.excepthook(type(failure), failure, failure.__traceback__)
    sys.stdout.flush()
    sys.stderr.flush()
    ending.wait("end")


def run_as_main(script: Script) -> None:
    """Run a file as `python FILE` does, or a module as `python -m MODULE` does."""
    sys.argv = [script.path, *script.arguments]
    warnings.resetwarnings()
    atexit._clear()
    if script.is_module:
        sys.path[0] = os.getcwd()
        runpy.run_module(script.path, run_name="__main__", alter_sys=True)
        return
    sys.path[0] = os.path.dirname(os.path.abspath(script.path))
    with open(script.path, "rb") as file:
        code = compile(file.read(), script.path, "exec")
    main = types.ModuleType("__main__")
    main.__file__ = script.path
    main.__builtins__ = __builtins__  # type: ignore[attr-defined]
    sys.modules["__main__"] = main
    exec(code, vars(main))


def observe(recorder: Recorder, ending: Ending) -> None:
    """Install all observers."""
    report_to(recorder)
    modules = Modules(recorder)
    losses = Losses(recorder, modules)
    windows = Windows(recorder)
    samples = Samples(recorder, ending, windows, modules)
    collectives = Collectives(recorder, modules)
    steps = Steps(recorder, ending, modules, losses, windows, collectives)
    losses.on_backward += [samples.begin_backward, ending.begin_backward]
    steps.on_step += [samples.begin_step]
    steps.position = samples.position
    others = (collectives, Files(recorder), Schedules(recorder), Scaling(recorder))
    for observer in (modules, losses, windows, samples, steps, *others):
        observer.install()
    before(dist, "init_process_group", _refuse_in_child(recorder))
    replace(dist, "init_process_group", _joining)
    dist.distributed_c10d.init_process_group = dist.init_process_group
    before(torch.multiprocessing, "spawn", _refuse_to_spawn(recorder, ending))  # which never returns


def _joining(original: Function) -> Function:
    """Let a script that asks for NCCL have gloo where there is no GPU."""
    given = os.environ.get("MASTER_PORT")

    def call(backend: str | None = None, *args: Any, **kwargs: Any) -> Any:
        if not torch.cuda.is_available():
            backend = None if backend is None else "gloo"
            kwargs.pop("device_id", None)
        method = kwargs.get("init_method") or next(iter(args), None)
        if os.environ.get("MASTER_PORT") != given or _names_another_port(method):  # nobody serves a store there yet
            os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
        original(backend, *args, **kwargs)
        _kept.append(dist.group.WORLD)

    return call


def _names_another_port(method: Any) -> bool:
    """Return whether ranks are told to meet at an address of their own."""
    if not isinstance(method, str) or not method.startswith("tcp://"):
        return False
    return str(urlsplit(method).port) != os.environ.get("MASTER_PORT")


def _refuse_to_spawn(recorder: Recorder, ending: Ending) -> Function:
    def look(*args: Any, **kwargs: Any) -> None:
        recorder.tell("spawns", where=stack())
        ending.wait("spawns")

    return look


def _refuse_in_child(recorder: Recorder) -> Function:
    """Tell of a process that the script has forked to be a rank, and is not observed as one."""

    def look(*args: Any, **kwargs: Any) -> None:
        if not recorder.is_main:
            recorder.tell("spawns", where=stack())

    return look


def _exit_code(end: SystemExit) -> int:
    if isinstance(end.code, int):
        return end.code
    if end.code is None:
        return 0
    print(end.code, file=sys.stderr)
    return 1


def _describe(error: BaseException | None) -> str:
    if error is None:
        return ""
    return traceback.format_exception_only(error)[-1].strip()


def _places(error: BaseException | None) -> list[Any]:
    """List the script's lines of a traceback, the innermost first."""
    places = []
    trace: TracebackType | None = error.__traceback__ if error else None
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if is_own(file):
            places.append(place_of(trace.tb_frame)._replace(line=trace.tb_lineno))
        trace = trace.tb_next
    return places[::-1]
