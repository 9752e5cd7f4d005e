"""Run a script as the main program of a rank's process."""

from __future__ import annotations

import functools
import os
import runpy
import sys
import traceback
import types
import warnings
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

_kept: list[Any] = []  # process groups, whose destructors may hang


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


def run_script(script: Script) -> tuple[int, BaseException | None]:
    """Run a script to its end.

    Returns:
        Its exit code, and the exception that it has not caught, if there is one, for `sys.excepthook`.
    """
    failure = None
    code = 0
    try:
        _run_as_main(script)
    except SystemExit as end:
        code = _exit_code(end)
    except BaseException as error:
        failure = error
        code = 1
    return code, failure


def _run_as_main(script: Script) -> None:
    """Run a file as `python FILE` does, or a module as `python -m MODULE` does."""
    sys.argv = [script.path, *script.arguments]
    warnings.resetwarnings()
    if script.is_module:
        sys.path[0] = script.home
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


def describe(error: BaseException | None) -> str:
    """Write an exception on one line, "" for none."""
    if error is None:
        return ""
    return traceback.format_exception_only(error)[-1].strip()


def _exit_code(end: SystemExit) -> int:
    if isinstance(end.code, int):
        return end.code
    if end.code is None:
        return 0
    print(end.code, file=sys.stderr)
    return 1


def use_gloo_without_gpus() -> None:
    """Let a script that asks for NCCL have gloo where there is no GPU, and its ranks meet where it says."""
    original = dist.init_process_group
    given = os.environ.get("MASTER_PORT")

    @functools.wraps(original)
    def join(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        if not torch.cuda.is_available():
            backend = None if backend is None else "gloo"
            kwargs.pop("device_id", None)
        method = kwargs.get("init_method") or next(iter(args), None)
        if os.environ.get("MASTER_PORT") != given or _names_another_port(method):  # nobody serves a store there yet
            os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
        original(backend, *args, **kwargs)
        _kept.append(dist.group.WORLD)

    dist.init_process_group = join
    dist.distributed_c10d.init_process_group = join


def _names_another_port(method: Any) -> bool:
    """Return whether ranks are told to meet at an address of their own."""
    if not isinstance(method, str) or not method.startswith("tcp://"):
        return False
    return str(urlsplit(method).port) != os.environ.get("MASTER_PORT")
