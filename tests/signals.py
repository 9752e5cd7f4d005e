"""Sends signals: to a training run, as a scheduler does that is about to end it; to a process, to stop it."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

import ddpkit


@contextmanager
def signalled(rank: int, step: int, number: int = signal.SIGUSR1) -> Iterator[None]:
    """Signals this process, if it is that rank, after so many optimiser steps in the block."""
    steps = itertools.count(1)

    def count(*_: Any) -> None:
        if next(steps) == step and ddpkit.get_rank() == rank:
            os.kill(os.getpid(), number)

    hook = register_optimizer_step_post_hook(count)
    try:
        yield
    finally:
        hook.remove()


def stop_process(pid: int) -> None:
    """Stops a process, and waits until all its threads are: the others go on until the main one gets a core."""
    os.kill(pid, signal.SIGSTOP)
    while any(_state(thread) not in "TtXZ" for thread in Path(f"/proc/{pid}/task").iterdir()):
        time.sleep(0.001)


def _state(thread: Path) -> str:
    try:
        return thread.joinpath("stat").read_text().rpartition(")")[2].split()[0]
    except OSError:  # it has ended
        return "X"
