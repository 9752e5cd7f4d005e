"""The arguments of `setup()`, checked."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..arguments import as_integer, check_timeout


@dataclass(frozen=True)
class Options:
    """The arguments of `setup()`."""

    backend: str | None = None
    device: torch.device | None = None
    timeout: timedelta = timedelta(minutes=10)
    num_threads: int | None = None
    watch: bool = True


def checked_options(backend: Any, device: Any, timeout: Any, num_threads: Any, watch: Any) -> Options:
    """Convert the arguments of `setup()`.

    Raises:
        TypeError: If the time-out is a number.
        ValueError: If an argument cannot be used.
    """
    check_timeout(timeout)
    if not isinstance(watch, bool):
        raise ValueError(f"watch must be True or False, got {watch!r}.")
    if num_threads is not None:
        num_threads = as_integer(num_threads, "num_threads")
    return Options(checked_backend(backend), checked_device(device), timeout, num_threads, watch)


def checked_backend(backend: Any) -> str | None:
    """Convert a backend's name; raise ValueError if torch knows none by it."""
    if backend is None:
        return None
    if not isinstance(backend, str):
        raise ValueError(f"backend must be a name such as 'gloo', got {backend!r}.")
    asked = backend.lower()
    known = [name for name in dist.Backend.backend_list if name not in ("undefined", "fake")]
    for part in asked.split(","):  # "cpu:gloo,cuda:nccl"
        name = part.rpartition(":")[2]
        if name not in known:
            names = ", ".join(known)
            raise ValueError(f"backend={backend!r} is none that torch knows here: {names}, or cpu:gloo,cuda:nccl.")
    return asked


def checked_device(device: Any) -> torch.device | None:
    """Convert a device or its name; raise ValueError if torch knows none by it."""
    if device is None:
        return None
    if not isinstance(device, (str, torch.device)):
        raise ValueError(f"device must be a torch.device or a name such as 'cuda:0', got {device!r}.")
    try:
        return torch.device(device)
    except RuntimeError as error:  # torch lists its kinds of device
        raise ValueError(f"device={device!r} is no device: {error}") from error
