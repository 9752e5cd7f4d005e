"""Sends a training run a signal, as a scheduler does that is about to end it."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
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
