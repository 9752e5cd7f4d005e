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
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

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
    # to switch it off imports torch._inductor, which takes a second
    if torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(False)
    if not dist.is_initialized():  # else setup() has chosen
        torch.set_num_threads(_beginning.threads)


@dataclass
class Traces:
    """The state that a test should leave as it was, as far as it is not reset."""

    threads: set[int]
    children: set[str]
    signals: dict[int, Any]
    loggers: dict[str, tuple[Any, ...]]
    groups: int

    def compare(self, later: Traces) -> list[str]:
        """Name the additions and changes since; threads and processes get a moment to end."""
        deadline = time.monotonic() + _THREADS_ENDING
        while self._has_new_threads_or_children(later) and time.monotonic() <= deadline:
            time.sleep(0.01)
            later = traces()
        found = []
        if later.threads - self.threads:
            found.append("a thread")
        if later.children - self.children:
            found.append("a child process")
        if later.signals != self.signals:
            found.append("a signal handler")
        for name, settings in self.loggers.items():
            if later.loggers.get(name) != settings:
                found.append(f"settings of the logger {name}")
        if later.groups > self.groups:
            found.append("a process group")
        return found

    def _has_new_threads_or_children(self, later: Traces) -> bool:
        return bool(later.threads - self.threads or later.children - self.children)


def traces() -> Traces:
    """Read the state that cannot be reset."""
    signals: dict[int, Any] = {}
    for number in signal.valid_signals():
        handler = signal.getsignal(number)
        is_known = getattr(handler, "__module__", None) in _HANDLERS
        signals[number] = signal.SIG_DFL if is_known else handler
    return Traces(
        _threads(),
        _children(),
        signals,
        loggers=_loggers(),
        groups=len(groups()),
    )


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
        is_public = name.count(".") <= 1
        if package == "ddpkit" or self._is_of_project(module):
            self._keep(name, module, "")
            self._keep_classes(name, module, "")
        elif package in _LIBRARIES and is_public:
            self._keep(name, module, package)
            if package == "torch":
                self._keep_classes(name, module, package)

    def _is_of_project(self, module: ModuleType) -> bool:
        file = getattr(module, "__file__", None) or ""
        return file.startswith(self._root) and "site-packages" not in file

    def _keep(self, name: str, space: ModuleType | type, package: str) -> None:
        self._kept[id(space)] = _Kept(name, package, vars(space))

    def _keep_classes(self, name: str, module: ModuleType, package: str) -> None:
        """Keep the classes that a module, or the package if one is given, defines itself."""
        origin = package or name
        for value in [*vars(module).values()]:
            if issubclass(type(value), type) and value.__module__.startswith(origin):
                self._keep(f"{name}.{value.__qualname__}", value, package)


class _Kept:
    """The functions and classes of a module, or the methods of a class; quick to compare."""

    def __init__(self, name: str, package: str, space: Mapping[str, Any]) -> None:
        self.name = name
        self._package = package  # that may replace its own; "" for none
        self._space = space
        self._keys = [key for key, value in [*space.items()] if _is_code(key, value)]
        self._remember()

    def is_changed(self) -> bool:
        """Return whether somebody else has replaced or deleted something."""
        try:
            found = self._values_of(self._space)
        except KeyError:
            return True
        if found == self._values:
            return False
        for value, old in zip(found, self._values, strict=True):
            if value is not old and not self._is_own(value) and not _is_hooked(value, old):
                return True
        self._remember()
        return False

    def _remember(self) -> None:
        # twice what each has: itemgetter needs a key, and returns a tuple only for several
        self._values_of = itemgetter("__doc__", "__doc__", *self._keys)
        self._values = self._values_of(self._space)

    def _is_own(self, value: Any) -> bool:
        """Return whether the package that may replace its own names has made this value."""
        function = getattr(value, "fget", value)
        maker = getattr(function, "__module__", None) or ""
        return bool(self._package) and f"{maker}.".startswith(f"{self._package}.")


def _is_code(name: str, value: Any) -> bool:
    """Return whether a name stands for code; a private variable that happens to hold a function does not."""
    kind = type(value)  # not what a deprecated name says of itself
    if kind is FunctionType and name.startswith("_") and not name.startswith("__"):
        return bool(value.__name__ == name)
    return issubclass(kind, _CODE)


def _is_hooked(value: Any, old: Any) -> bool:
    """Return whether torch has put its hooks around this `step`, as it does for each class of optimizers."""
    return bool(getattr(value, "hooked", False)) and getattr(value, "__wrapped__", None) is old


def _threads() -> set[int]:
    return {thread.ident or 0 for thread in threading.enumerate()}


def _loggers() -> dict[str, tuple[Any, ...]]:
    """Read the settings of loggers, but of torch's, which it changes when parts of it are imported."""
    loggers: dict[str, logging.Logger] = {"root": logging.root}
    for name, logger in logging.root.manager.loggerDict.items():
        if isinstance(logger, logging.Logger) and not name.startswith("torch"):
            loggers[name] = logger
    settings = {}
    for name, logger in loggers.items():
        lists = (*logger.handlers,), (*logger.filters,)
        settings[name] = (logger.level, logger.disabled, logger.propagate, *lists)
    return settings


def _children() -> set[str]:
    multiprocessing.active_children()  # collects those that have ended
    if sys.platform != "linux":
        return {str(child.pid) for child in multiprocessing.active_children()}
    return set(map(str, child_processes()))
