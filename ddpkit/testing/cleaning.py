"""Clean up after a test in a rank's process: reset what can be reset, and report the rest."""

from __future__ import annotations

import logging
import multiprocessing
import random
import signal
import sys
import threading
import time
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from ..launch.process_tree import child_processes
from ..torch_internals import groups
from ..watch import main_thread

_THREADS_ENDING = 1.0  # seconds for ending threads and processes to end
_SEED = 0
# modules whose signal handlers may stay: ddpkit's while it has joined, and torch's, which a loader with
# workers sets for good, to notice those that die
_HANDLERS = {main_thread.__name__, "torch.utils.data._utils.signal_handling"}


def reset(arguments: list[str], threads: int) -> None:
    """Start the next test in the state of the first, with these arguments and threads."""
    sys.argv[:] = arguments
    random.seed(_SEED)
    np.random.seed(_SEED)
    torch.manual_seed(_SEED)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_grad_enabled(True)
    # to switch it off imports torch._inductor, which takes a second
    if torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(False)
    if not dist.is_initialized():  # else setup() has set them
        torch.set_num_threads(threads)


class Traces(NamedTuple):
    """The state that a test should leave unchanged, as far as it is not reset.

    Attributes:
        living: What should have ended, by name: sets, and a number.
        settings: What should be unchanged, by name.
    """

    living: dict[str, Any]
    settings: dict[str, Any]

    def changes(self) -> list[str]:
        """Describe additions and changes since; threads and processes get a moment to end."""
        deadline = time.monotonic() + _THREADS_ENDING
        while True:
            now = traces()
            found = [name for name, had in self.living.items() if not now.living[name] <= had]
            if not found or time.monotonic() > deadline:
                break
            time.sleep(0.01)
        for name, had in self.settings.items():
            if now.settings.get(name) != had:
                found.append(name)
        return found


def traces() -> Traces:
    """Read the state that cannot be reset."""
    multiprocessing.active_children()  # reaps those that have ended
    living = {
        "a thread": {thread.ident for thread in threading.enumerate()},
        "a child process": {*child_processes()},
        "a process group": len(groups()),
    }
    handlers = {}
    for number in signal.valid_signals():
        handler = signal.getsignal(number)
        is_known = getattr(handler, "__module__", None) in _HANDLERS
        handlers[number] = signal.SIG_DFL if is_known else handler
    settings: dict[str, Any] = {"a signal handler": handlers}
    for logger in (logging.root, *logging.root.manager.loggerDict.values()):
        # parts of torch change its loggers when imported
        if isinstance(logger, logging.Logger) and not logger.name.startswith("torch"):
            lists = (*logger.handlers,), (*logger.filters,)
            values = (logger.level, logger.disabled, logger.propagate, *lists)
            settings[f"settings of the logger {logger.name}"] = values
    return Traces(living, settings)
