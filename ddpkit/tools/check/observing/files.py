"""Observe files that are written, and the states that are saved in them."""

from __future__ import annotations

import ast
import os
import pickle
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from ...script.recorder import Recorder
from ..places import is_own, stack
from .expressions import evaluate, running
from .patching import before

_WRITES = os.O_WRONLY | os.O_RDWR
_PREFIXES = ("module.", "_orig_mod.", "_forward_module.")
_LOCKS = ("fcntl.flock", "fcntl.lockf")
_ELSEWHERE = ("/dev/", "/proc/", "/sys/")


class Files:
    """Observes the opening of files from the moment of `install`."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._busy = False

    def install(self) -> None:
        """Begin."""
        sys.addaudithook(self._audit)
        before(torch, "save", self._save)
        before(pickle, "dump", self._save)
        before(nn.Module, "load_state_dict", self._load)

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if self._busy or not self._recorder.is_main:
            return
        if event in _LOCKS:
            self._tell_lock(args[0])
        elif event == "open":
            self._note_open(*args)

    def _tell_lock(self, descriptor: int) -> None:
        """Tell of a file that ranks write one after the other, or use as a lock alone."""
        with suppress(OSError):
            self._recorder.tell("locked", path=os.readlink(f"/proc/self/fd/{descriptor}"))

    def _note_open(self, path: Any, mode: str | None, flags: int | None) -> None:
        if (flags or 0) & os.O_EXCL:  # one rank alone can
            return
        writes = any(letter in (mode or "") for letter in "wa+") or bool((flags or 0) & _WRITES)
        if writes and isinstance(path, str | bytes | os.PathLike):
            appends = "a" in (mode or "") or bool((flags or 0) & os.O_APPEND)
            self._tell(os.fsdecode(path), appends, "open")

    def _tell(self, path: str, appends: bool, call: str) -> None:
        self._busy = True
        try:
            full = os.path.realpath(path)
            places = stack()
            if places and not full.startswith(_ELSEWHERE) and "__pycache__" not in full and _is_direct():
                self._recorder.tell("file", path=full, appends=appends, call=call, where=places)
        finally:
            self._busy = False

    def _save(self, obj: Any, f: Any = None, *args: Any, **kwargs: Any) -> None:
        places = stack()
        keys = list(_wrapped_keys(obj))
        if keys and places:
            loads = _loads_into_wrapper(keys[0])
            self._recorder.tell("saved", keys=keys[:3], number=len(keys), where=places, loads=loads)
        if isinstance(f, str | os.PathLike):
            self._tell(os.fspath(f), False, "torch.save")

    def _load(self, module: nn.Module, state: Any, *args: Any, **kwargs: Any) -> None:
        keys = _wrapped_keys(state)
        if keys and _has_tensor(module, keys[0]):
            self._recorder.tell("wrapper loads", keys=keys[:3])


def _has_tensor(module: Any, name: str) -> bool:
    if not isinstance(module, nn.Module):
        return False
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return any(name == other for other, _ in tensors)


def _loads_into_wrapper(name: str) -> bool:
    """Return whether a running function also loads a state into a wrapper with a tensor of this name."""
    for frame, nodes in running():
        for node in nodes:
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            owner = node.func.value
            is_load = node.func.attr == "load_state_dict" and _is_assigned_before(owner, node.lineno, nodes)
            if is_load and _has_tensor(evaluate(owner, frame), name):
                return True
    return False


def _is_assigned_before(owner: ast.expr, line: int, nodes: list[ast.AST]) -> bool:
    """Return whether what an expression names is not replaced behind a line, as by wrapping it."""
    for node in nodes:
        targets = node.targets if isinstance(node, ast.Assign) and node.lineno > line else []
        if any(ast.unparse(target) == ast.unparse(owner) for target in targets):
            return False
    return True


def _is_direct() -> bool:
    """Return whether the script asks for the file, not a module that is being imported or compiled."""
    frame = sys._getframe(2)
    while frame is not None and not is_own(frame.f_code.co_filename):
        if "importlib" in frame.f_code.co_filename or "_inductor" in frame.f_code.co_filename:
            return False
        frame = frame.f_back  # type: ignore[assignment]
    return True


def _wrapped_keys(obj: Any, depth: int = 3) -> list[str]:
    """Find the names of a wrapper in a saved state: on all tensors of one dictionary."""
    if not isinstance(obj, Mapping) or not depth:
        return []
    names = [key for key, value in obj.items() if isinstance(key, str) and isinstance(value, Tensor)]
    if names:
        compiled = [name for name in names if "_orig_mod." in name]
        if compiled or all(name.startswith(_PREFIXES) for name in names):
            return compiled or names
    found: list[str] = []
    for value in obj.values():
        found += _wrapped_keys(value, depth - 1)
    return found
