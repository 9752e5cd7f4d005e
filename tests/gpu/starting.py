"""Start what the checks look at: ranks that share one device, ranks on a GPU each, and programs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

import ddpkit
from ddpkit.testing import on_ranks

ROOT = Path(__file__).parents[2]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
_TIMEOUT = timedelta(seconds=40)  # of the ranks' waits


class Crew:
    """Ranks that a check looks at: so many that share one device, or one on each device, on the CPU two.

    Attributes:
        device: The kind of device.
        size: The number of ranks.
    """

    def __init__(self, device: str, sharing: int | None) -> None:
        self.device, self.size = device, sharing or several()
        self._share = sharing is not None

    def __call__(self, fn: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        """Call `fn(*args)` on each; return the results by rank."""
        if self._share:
            return on_one_device(fn, self.size, self.device, *args, **options)
        return on_a_gpu_each(fn, *args, **options)


def on_one_device(
    fn: Callable[..., Any], nprocs: int, device: str, *args: Any, timeout: float = 60.0, fresh: bool = False
) -> list[Any]:
    """Call `fn(*args)` on ranks that share one device; return the results by rank.

    On a GPU one rank has NCCL, and several have gloo, for NCCL refuses them.
    Say `fresh` if `fn` changes how torch works.
    """
    return on_ranks(_join, nprocs, first_of(device), fn, args, timeout=timeout, join=False, fresh=fresh)


def on_a_gpu_each(fn: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
    """Call `fn(*args)` on as many ranks as there are GPUs, on the CPU on two; return the results by rank."""
    return on_ranks(_join, several(), None, fn, args, timeout=timeout, join=False)


def first_of(device: str) -> str:
    """Name the first device of a kind."""
    return f"{device}:0" if device == "cuda" else device


def several() -> int:
    """Return the number of ranks that `on_a_gpu_each` starts."""
    return max(2, torch.cuda.device_count())


def wait_for(device: torch.device) -> None:
    """Wait until a device has done what it was asked to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _join(device: str | None, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    with ddpkit.distributed(device=device, timeout=_TIMEOUT):
        return fn(*args)


def run(command: list[str], timeout: float = 90.0, folder: Path = ROOT) -> str:
    """Run a program that has to end well, and return what it has printed."""
    process = subprocess.Popen(
        command,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise AssertionError(f"not finished after {timeout:g} s:\n{output}") from None
    assert process.returncode == 0, output
    return output
