"""Observe a checked process, and send facts from it to the one that started it."""

from __future__ import annotations

import functools
import inspect
import json
import os
import sys
import threading
import traceback
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.jit import _builtins as builtins
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes

from ..collectives.differences import checksum
from ..collectives.tree import flat_bytes, is_dense

Record = dict[str, Any]


class Recorder:
    """Writes records to a pipe, one a line.

    Args:
        descriptor: Of the pipe.

    Attributes:
        step: The number of optimiser steps that have begun, of the optimiser that is ahead.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.RLock()  # a handler of signals may tell something, too
        self._pending: list[bytes] = []
        self._is_writing = False
        self._owner = os.getpid()
        self.step = 0
        _recorders[:] = [self]

    @property
    def is_main(self) -> bool:
        """Tell the rank's process from a loader's worker that was forked from it."""
        return os.getpid() == self._owner

    def tell(self, kind: str, **fields: Any) -> None:
        """Send a record: its kind, the present step, and its fields, of JSON's types."""
        record = {"kind": kind, "step": self.step, **fields}
        line = json.dumps(record, separators=(",", ":")).encode() + b"\n"
        if not self.is_main:  # short lines are written whole, and the lock may be held for ever
            os.write(self._descriptor, line)
            return
        with self._lock:
            self._pending.append(line)
            if not self._is_writing:  # else the write that was interrupted goes on with it
                self._write()

    def _write(self) -> None:
        """Write all lines that are pending; the reader skips one of which an exception left a part."""
        self._is_writing = True
        try:
            while self._pending:
                view = memoryview(self._pending.pop(0))
                while view:
                    view = view[os.write(self._descriptor, view) :]
        except BaseException:
            self._pending.insert(0, b"\n")
            raise
        finally:
            self._is_writing = False


# Replace functions of torch in the checked process.

Function = Callable[..., Any]
_failed: set[str] = set()
_MODES = torch._C._TorchDispatchModeKey
_TRACING = (_MODES.FAKE, _MODES.PROXY, _MODES.FUNCTIONAL)
_recorders: list[Recorder] = []  # of this process


def current() -> Recorder:
    """Return the recorder of this process."""
    return _recorders[0]


def guarded(look: Function) -> Function:
    """Let an observer take those arguments that it names, or all if it takes `*args`.

    Where it would fail the script, it returns None, and its error becomes a record, once. While torch traces the script
    it sees nothing; what it does itself is unseen by the script's modes and by subclasses of tensors.
    """
    parameters = inspect.signature(look).parameters
    takes_all = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters.values())

    @functools.wraps(look)
    def call(*args: Any, **kwargs: Any) -> Any:
        if is_tracing():
            return None
        try:
            with torch._C.DisableTorchFunction(), _disable_current_modes():
                if takes_all:
                    return look(*args, **kwargs)
                named = {name: kwargs[name] for name in parameters if name in kwargs}
                return look(*args[: len(parameters)], **named)
        except Exception:
            if look.__qualname__ not in _failed:
                _failed.add(look.__qualname__)
                current().tell("failure", name=look.__qualname__, error=traceback.format_exc()[-2000:])
            return None

    return call


def is_tracing() -> bool:
    """Return whether torch does not compute, but records what the script computes, or transforms it."""
    is_transformed = torch._C._functorch.peek_interpreter_stack() is not None
    if is_transformed or torch._C._is_tracing() or torch.compiler.is_compiling():
        return True
    return any(torch._C._get_dispatch_mode(key) is not None for key in _TRACING)


def replace(owner: Any, name: str, make: Callable[[Function], Function]) -> None:
    """Put a function in the place of another.

    Args:
        owner: The module or class that has it; so does the module that defines it, by which it is pickled, and
            TorchScript, where it is an operator.
        name: Its name; nothing happens where there is none of that name.
        make: Makes the new function from the former one.
    """
    original = getattr(owner, name, None)
    if original is None:
        return
    new = functools.wraps(original)(make(original))
    setattr(owner, name, new)
    home = sys.modules.get(getattr(original, "__module__", ""))
    if getattr(home, name, None) is original:
        setattr(home, name, new)
    if operator := builtins._find_builtin(original):  # type: ignore[no-untyped-call]
        builtins._register_builtin(new, operator)


def before(owner: Any, name: str, look: Function) -> None:
    """Call `look` with a function's arguments before the function itself."""
    look = guarded(look)

    def make(original: Function) -> Function:
        def call(*args: Any, **kwargs: Any) -> Any:
            look(*args, **kwargs)
            return original(*args, **kwargs)

        return call

    replace(owner, name, make)


def after(owner: Any, name: str, look: Function) -> None:
    """Call `look` with a function's arguments after the function itself."""
    look = guarded(look)

    def make(original: Function) -> Function:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            look(*args, **kwargs)
            return result

        return call

    replace(owner, name, make)


# Describe tensors by few numbers, by which ranks can be compared.

_SAMPLES = 16  # elements that are shown of a tensor
_SMALL = 1 << 16  # elements of statistics
_HASHED = 1 << 24  # bytes of a batch that are hashed


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """List an optimizer's parameters, of all its groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def whole(tensor: Tensor) -> Tensor | None:
    """Return a tensor that each rank holds whole, None for one that is spread over ranks."""
    if type(tensor).__name__ == "FlatParameter":  # of the first FSDP
        return None
    if isinstance(tensor, DTensor):
        if any(not placement.is_replicate() for placement in tensor.placements):
            return None
        return tensor.to_local()
    return tensor


def hash_of(tensor: Tensor) -> int:
    """Hash a tensor's bytes; 0 for one that has none to show."""
    plain = tensor.detach()
    return checksum(plain) if is_dense(plain) else 0


def sample(tensor: Tensor) -> list[float]:
    """Return up to 16 elements of a tensor, from everywhere in it."""
    flat = tensor.detach().reshape(-1)
    stride = max(1, -(-flat.numel() // _SAMPLES))
    values: list[float] = flat[::stride].to("cpu", torch.float64).tolist()
    return values


def tensors_in(value: Any, depth: int = 3) -> Iterator[Tensor]:
    """Yield the tensors in nested containers and in the fields of objects."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        yield torch.from_numpy(np.array(value))  # a copy: it may be read-only
    elif depth and isinstance(value, Mapping):
        for child in value.values():
            yield from tensors_in(child, depth - 1)
    elif depth and isinstance(value, list | tuple):
        for child in value:
            yield from tensors_in(child, depth - 1)
    elif depth and hasattr(value, "__dict__") and not isinstance(value, type):
        yield from tensors_in(vars(value), depth - 1)


def small_hashes(value: Any) -> Iterator[int]:
    """Hash the small floating tensors in a value, those of statistics."""
    for tensor in () if isinstance(value, np.ndarray) and value.size > _SMALL else tensors_in(value, depth=2):
        if tensor.is_floating_point() and 0 < tensor.numel() <= _SMALL and whole(tensor) is tensor:
            yield hash_of(tensor)


def content(value: Any) -> int:
    """Hash the tensors of a batch; 0 if they are none, or all of their elements are equal."""
    hashed = 0
    varied = False
    for tensor in tensors_in(value):
        if not is_dense(tensor) or tensor.is_meta or tensor.numel() < 2:
            continue
        flat = tensor.detach().reshape(-1)
        part = flat[: _HASHED // flat.element_size()].cpu()
        varied = varied or bool((part != part[0]).any())
        hashed = zlib.crc32(flat_bytes(part).numpy().data, hashed)
    return hashed if varied else 0


def size_of(value: Any) -> int:
    """Return the number of samples in a batch: the first dimension of its first tensor that has one."""
    for tensor in tensors_in(value):
        if tensor.ndim:
            return len(tensor)
    return 0
