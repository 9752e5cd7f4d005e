"""What a test may leave in a rank's process: it is reset where that is possible, and found where it is not."""

from __future__ import annotations

import logging
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from .. import interrupting

_PATIENCE = 1.0  # seconds in which threads and processes that are ending may end
_SEED = 0


@dataclass
class _Beginning:
    """The process before its first test."""

    threads: int
    arguments: list[str]


_beginning = _Beginning(1, [])


def remember() -> None:
    """Take the present state as the one to which tests return."""
    _beginning.threads = torch.get_num_threads()
    _beginning.arguments = [*sys.argv]


def reset() -> None:
    """Give the next test the same beginning as the first."""
    sys.argv[:] = _beginning.arguments
    random.seed(_SEED)
    np.random.seed(_SEED)
    torch.manual_seed(_SEED)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_grad_enabled(True)
    if torch.are_deterministic_algorithms_enabled():  # to switch it off imports torch._inductor, which takes a second
        torch.use_deterministic_algorithms(False)
    if not dist.is_initialized():  # else setup() has chosen
        torch.set_num_threads(_beginning.threads)


@dataclass
class Traces:
    """What a test should leave as it was, as far as it is not reset."""

    threads: set[int]
    children: set[str]
    signals: dict[int, Any]
    handlers: list[Any]
    groups: int

    def compare(self, later: Traces) -> list[str]:
        """Name what has been added or changed since, giving threads and processes a moment to end."""
        deadline = time.monotonic() + _PATIENCE
        while later.threads - self.threads or later.children - self.children:
            if time.monotonic() > deadline:
                break
            time.sleep(0.01)
            later = traces()
        found = []
        if later.threads - self.threads:
            found.append("a thread")
        if later.children - self.children:
            found.append("a child process")
        if later.signals != self.signals:
            found.append("a signal handler")
        if later.handlers != self.handlers:
            found.append("a handler of the root logger")
        if later.groups > self.groups:
            found.append("a process group")
        return found


def traces() -> Traces:
    """Look at what cannot be reset."""
    signals: dict[int, Any] = {number: signal.getsignal(number) for number in signal.valid_signals()}
    for number, handler in signals.items():
        if getattr(handler, "__module__", None) == interrupting.__name__:  # ddpkit's own while it has joined
            signals[number] = signal.SIG_DFL
    return Traces(_threads(), _children(), signals, [*logging.root.handlers], len(dist.distributed_c10d._world.pg_map))


def _threads() -> set[int]:
    return {thread.ident or 0 for thread in threading.enumerate()}


def _children() -> set[str]:
    multiprocessing.active_children()  # collects those that have ended
    if sys.platform != "linux":
        return {str(child.pid) for child in multiprocessing.active_children()}
    tasks = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    return {child for task in tasks for child in task.read_text().split()}
