"""Clean up after a test in a rank's process: reset all that can be, and find the rest."""

from __future__ import annotations

import logging
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Mapping
from operator import itemgetter
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from ..launch.process_tree import child_processes
from ..torch_internals import groups
from ..watch import main_thread

_THREADS_ENDING = 1.0  # seconds in which threads and processes that are ending may end
_SEED = 0
# modules whose signal handlers may stay: ddpkit's while it has joined, and torch's, set for good by
# a loader with workers, which notices those that die
_HANDLERS = {main_thread.__name__, "torch.utils.data._utils.signal_handling"}
_CODE = (FunctionType, BuiltinFunctionType, type, classmethod, staticmethod, property)
# setup() sets a hook of sys
_LIBRARIES = sys.stdlib_module_names - {"sys"} | {"ddpkit", "numpy", "torch"}


def reset(arguments: list[str], threads: int) -> None:
    """Give the next test the same beginning as the first, with these arguments and threads."""
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
    if not dist.is_initialized():  # else setup() has chosen
        torch.set_num_threads(threads)


class Traces(NamedTuple):
    """The state that a test should leave as it was, as far as it is not reset.

    Attributes:
        living: What should have ended, by its name: sets, and a number.
        settings: What should be unchanged, by its name.
    """

    living: dict[str, Any]
    settings: dict[str, Any]

    def changes(self) -> list[str]:
        """Name the additions and changes since; threads and processes get a moment to end."""
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
    multiprocessing.active_children()  # collects those that have ended
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
        # torch's change when parts of it are imported
        if isinstance(logger, logging.Logger) and not logger.name.startswith("torch"):
            lists = (*logger.handlers,), (*logger.filters,)
            values = (logger.level, logger.disabled, logger.propagate, *lists)
            settings[f"settings of the logger {logger.name}"] = values
    return Traces(living, settings)


class Originals:
    """The functions, classes and methods that tests may replace, as they were before.

    Args:
        root: The project's folder. All of its modules count, and the public ones of libraries.
    """

    def __init__(self, root: Path) -> None:
        self._root = f"{root}{os.sep}"
        self._seen: set[str] = set()
        self._kept: dict[int, _Kept] = {}

    def learn(self) -> None:
        """Take in the modules that have been imported since."""
        for name in sys.modules.keys() - self._seen:
            self._seen.add(name)
            module = sys.modules.get(name)
            if isinstance(module, ModuleType):
                self._learn_module(name, module)

    def replaced(self) -> list[str]:
        """Name the modules and classes in which something has been replaced."""
        changed = [kept for kept in self._kept.values() if kept.is_changed()]
        return [f"a replaced function in {kept.name}" for kept in changed]

    def _learn_module(self, name: str, module: ModuleType) -> None:
        package = name.partition(".")[0]
        file = getattr(module, "__file__", None) or ""
        is_of_project = file.startswith(self._root) and "site-packages" not in file
        owner = package  # that may replace its own; "" for none
        if package == "ddpkit" or is_of_project:
            owner = ""
        elif package not in _LIBRARIES or name.count(".") > 1:
            return
        self._kept[id(module)] = _Kept(name, owner, vars(module))
        if owner not in ("", "torch"):
            return
        for value in [*vars(module).values()]:  # the classes that the module, or the owner, defines
            if issubclass(type(value), type) and value.__module__.startswith(owner or name):
                self._kept[id(value)] = _Kept(f"{name}.{value.__qualname__}", owner, vars(value))


class _Kept:
    """The functions and classes of a module, or the methods of a class; quick to compare."""

    def __init__(self, name: str, owner: str, space: Mapping[str, Any]) -> None:
        self.name = name
        self._owner = owner
        self._space = space
        keys = [key for key, value in [*space.items()] if _is_code(key, value)]
        # twice what each has: itemgetter, which is quick, returns a tuple only for several keys
        self._read = itemgetter("__doc__", "__doc__", *keys)
        self._values = self._read(space)

    def is_changed(self) -> bool:
        """Return whether somebody else has replaced or deleted something."""
        try:
            found = self._read(self._space)
        except KeyError:
            return True
        if found == self._values:
            return False
        for value, old in zip(found, self._values, strict=True):
            if value is not old and not self._is_own(value) and not _is_hooked(value, old):
                return True
        self._values = found
        return False

    def _is_own(self, value: Any) -> bool:
        """Return whether the package that may replace its own has made this value."""
        function = getattr(value, "fget", value)
        maker = getattr(function, "__module__", None) or ""
        return bool(self._owner) and f"{maker}.".startswith(f"{self._owner}.")


def _is_code(name: str, value: Any) -> bool:
    """Return whether a name stands for code; a private variable that happens to hold a function does not."""
    kind = type(value)  # not what a deprecated name says of itself
    if kind is FunctionType and name.startswith("_") and not name.startswith("__"):
        return bool(value.__name__ == name)
    return issubclass(kind, _CODE)


def _is_hooked(value: Any, old: Any) -> bool:
    """Return whether torch has put its hooks around this `step`, as it does for each class of optimizers."""
    return bool(getattr(value, "hooked", False)) and getattr(value, "__wrapped__", None) is old
