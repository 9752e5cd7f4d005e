"""The arguments of `setup()`, checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..arguments import as_integer, check_timeout, plain_index
from ..launch.launch import Launch

ChooseDevice = Callable[[int], str | torch.device]  # by the local rank
_PLACE = ("rank", "world_size", "local_rank", "local_world_size", "node_rank", "num_nodes", "master_port")


@dataclass(frozen=True)
class Origin:
    """Where the caller says that this process belongs, instead of the environment; nothing if it does not say.

    Attributes:
        launch: Its place in the job.
        store: Where the ranks meet.
        lost: Returns what became of a process without which this one cannot join, "" while all live.
        store_host: The rank that hosts the store.
    """

    launch: Launch | None = None
    store: dist.Store | None = None
    lost: Callable[[], str] | None = None
    store_host: int = 0


@dataclass(frozen=True)
class Options:
    """The arguments of `setup()`."""

    backend: str | None = None
    device: torch.device | ChooseDevice | None = None
    timeout: timedelta = timedelta(minutes=10)
    num_threads: int | None = None
    watch: bool = True
    origin: Origin = Origin()


def checked_origin(launch: Any, store: Any, rank: Any, world_size: Any) -> Origin:
    """Convert the arguments of `setup()` that say where this process belongs.

    Raises:
        TypeError: If one is of another type than it should be, or they do not go together.
        ValueError: If they describe no place in a job.
    """
    if store is None and (rank is not None or world_size is not None):
        raise TypeError("rank and world_size go with a store: setup(store=..., rank=..., world_size=...).")
    if store is not None:
        if launch is not None:
            raise TypeError("Pass a launch, or a store with rank and world_size, but not both.")
        if not isinstance(store, dist.Store):
            raise TypeError(f"store must be one of torch.distributed's, got {type(store).__name__}.")
        if rank is None or world_size is None:
            raise TypeError("A store does not say who this process is: pass rank and world_size, too.")
        said = (f"rank={rank}", f"world_size={world_size}", "both passed to setup()")
        launch = Launch("platform", plain_index(rank), plain_index(world_size), evidence=said)
    if launch is not None:
        _check_launch(launch, is_met_elsewhere=store is not None)
    return Origin(launch, store)


def _check_launch(launch: Any, is_met_elsewhere: bool) -> None:
    if not isinstance(launch, Launch):
        raise TypeError(f"launch must be a ddpkit.Launch, got {type(launch).__name__}.")
    for name in _PLACE:
        number = getattr(launch, name)
        if number is not None and (type(number) is not int or number < 0):
            raise ValueError(f"{name} must be an integer of at least 0, got {number!r}.")
    if launch.rank is None or launch.world_size is None or launch.rank >= launch.world_size:
        found = f"rank is {launch.rank} and world_size is {launch.world_size}"
        raise ValueError(f"rank must be in [0, world_size), but {found}.")
    has_address = launch.master_addr is not None and launch.master_port is not None
    if launch.kind in ("platform", "single") and launch.world_size > 1 and not (has_address or is_met_elsewhere):
        raise ValueError(
            f"A launch of {launch.world_size} processes needs master_addr and master_port, where the ranks meet, got "
            f"{launch.master_addr!r} and {launch.master_port!r}."
        )


def checked_options(backend: Any, device: Any, timeout: Any, num_threads: Any, watch: Any, origin: Origin) -> Options:
    """Convert the other arguments of `setup()`.

    Raises:
        TypeError: If the time-out is a number.
        ValueError: If an argument cannot be used.
    """
    check_timeout(timeout)
    if not isinstance(watch, bool):
        raise ValueError(f"watch must be True or False, got {watch!r}.")
    if num_threads is not None:
        num_threads = as_integer(num_threads, "num_threads")
    if not callable(device):
        device = checked_device(device)
    return Options(checked_backend(backend), device, timeout, num_threads, watch, origin)


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
        raise ValueError(
            f"device must be a torch.device, a name such as 'cuda:0', or a function of the local rank that returns "
            f"one, got {device!r}."
        )
    try:
        return torch.device(device)
    except RuntimeError as error:  # torch lists its kinds of device
        raise ValueError(f"device={device!r} is no device: {error}") from error
