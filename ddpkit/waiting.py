"""Placeholder while the protocol is being written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from . import ranks, runtime

T = TypeVar("T")


def exchange(value: str) -> list[str]:
    """Every rank's text, by rank, through the store; `[value]` on one process. Collective."""
    if not runtime.joined():
        return [value]
    out: list[Any] = [None] * ranks.get_world_size()
    dist.all_gather_object(out, value)
    return out


def barrier(name: str | None = None, timeout: timedelta | None = None) -> None:
    exchange("")


def run_on_main(fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Rank 0 runs `fn`; every rank gets its value (pickled), or its exception as a PeerError. Collective."""
    box: list[Any] = [None]
    if ranks.is_main_process():
        box = [fn(*args, **kwargs)]
    if runtime.joined():
        dist.broadcast_object_list(box, 0)
    return box[0]


@contextmanager
def main_process_first(local: bool = False) -> Iterator[None]:
    if not ranks.is_main_process():
        exchange("")
    yield
    if ranks.is_main_process():
        exchange("")


@contextmanager
def together(name: str | None = None) -> Iterator[None]:
    """A block after which either all ranks go on or all raise. Collective."""
    yield
    exchange("")


def main_process_only(fn: Callable[..., T]) -> Callable[..., T | None]:
    return lambda *a, **k: fn(*a, **k) if ranks.is_main_process() else None


def stop_together(flag: bool) -> bool:
    return "1" in exchange("1" if flag else "0")
