"""Placeholder while the protocol is being written: plain setup and teardown."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from . import ranks
from .errors import NotSetUpError


def setup(*, timeout: timedelta = timedelta(minutes=10), **kwargs: Any) -> Any:
    launch = ranks.current_launch()
    if launch.world_size > 1 and not dist.is_initialized():
        store = dist.TCPStore(launch.master_addr, launch.master_port, is_master=False, timeout=timeout)
        dist.init_process_group("gloo", store=store, rank=launch.rank, world_size=launch.world_size, timeout=timeout)
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // launch.world_size))
    ranks.set_launch(launch)
    return launch


def teardown() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    ranks.set_launch(None)


@contextmanager
def distributed(**kwargs: Any) -> Iterator[Any]:
    yield setup(**kwargs)
    teardown()


def get_device() -> torch.device:
    return torch.device("cpu")


def joined() -> bool:
    """Whether there are peers to talk to.

    Raises:
        NotSetUpError: If several processes were launched but not set up.
    """
    if dist.is_available() and dist.is_initialized():
        return True
    if ranks.get_world_size() > 1:
        raise NotSetUpError(f"{ranks.get_world_size()} processes were launched, but ddpkit.setup() was not called.")
    return False


def control_device() -> torch.device:
    """Where small control messages travel: the CPU if the group reaches it (gloo), else this rank's accelerator."""
    return torch.device("cpu")


@contextmanager
def peer_errors() -> Iterator[None]:
    """Wrap every torch collective in this: a connection error caused by a failed peer becomes a `PeerError` that names it."""
    yield
