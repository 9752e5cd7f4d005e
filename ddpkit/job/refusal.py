"""Tell waiting ranks why this process does not join."""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from ..errors import LaunchError
from ..launch import environment
from ..launch.detection import detect_launch
from ..launch.launch import Launch
from ..rendezvous.failures import JobContinues
from ..rendezvous.generation import Generation, StartedByRank
from ..rendezvous.store import connect_to_store, open_store, store_outlives_ranks, wait_for_listener

_READING = 5.0  # most seconds in which the ranks read why rank 0 does not join
_OPENING = 0.5  # seconds from the opening of a store until a job is in it
_STRANGER, _RANK = 2.0, 20.0  # seconds in which the job must start: rank 0 may still be starting


def tell_peers(error: Exception, launch: Launch | None) -> None:
    """Tell the ranks that may wait for this process why it does not join them."""
    with suppress(LaunchError):
        launch = launch or detect_launch(os.environ)
    reason = f"on {socket.gethostname()} could not join: {error}"
    if launch is None:  # the environment is contradictory
        address, port = os.environ.get("MASTER_ADDR"), environment.port(os.environ.get("MASTER_PORT"))
        if address and port:
            refuse_job(address, port, f"A process {reason}")
        return
    if launch.world_size == 1 or launch.master_addr is None or launch.master_port is None:
        return
    reason = f"Rank {launch.rank} {reason}"
    if launch.rank == 0:
        _refuse_as_rank_0(launch, launch.master_addr, launch.master_port, reason)
    else:
        refuse_job(launch.master_addr, launch.master_port, reason, is_rank=True)


def _refuse_as_rank_0(launch: Launch, address: str, port: int, reason: str) -> None:
    """Start the job that the others wait for, and cancel it."""
    with suppress(OSError, RuntimeError):
        outlives = store_outlives_ranks(launch)
        store = open_store(address, port, not outlives, timedelta(seconds=_READING))
        generation = Generation.new(store)
        generation.fail(reason)
        if not outlives:
            generation.await_readers(launch.world_size, _READING)


def refuse_job(address: str, port: int, reason: str, is_rank: bool = False) -> None:
    """Tell a job that this process does not belong to it, so that its ranks do not wait.

    Not the job of a rank that started this process, which waits for nobody.

    Args:
        address: Host of the job's store, now or later.
        port: Its port.
        reason: Message.
        is_rank: Whether this process is one of the job's ranks.
    """
    deadline = time.monotonic() + (_RANK if is_rank else _STRANGER)
    with suppress(OSError, RuntimeError):
        generation = _generation_in(_connect_anew(address, port, deadline), deadline)
        if generation is None or generation.parent_rank():
            return
        generation.fail(reason)
        if is_rank and not generation.is_complete():
            generation.await_readers(0, 0.0)  # it counts as one of them


def is_child_of_rank(address: str, port: int, world_size: int) -> bool:
    """Return whether a rank of the job there started this process, which is then a separate job of one rank.

    Raises:
        StartedByRank: If this process is to be one of several ranks.
        JobContinues: If that job continues without the ranks that it has lost.
    """
    try:
        store = _connect_anew(address, port, time.monotonic() + _STRANGER)
        generation = _generation_in(store, time.monotonic() + _OPENING)
        if generation is None:
            return False
        generation.raise_if_continued()
        return generation.is_started_by_rank(world_size)
    except (JobContinues, StartedByRank):
        raise
    except (OSError, RuntimeError):  # not a store, or no answer
        return False


def _generation_in(store: dist.Store, deadline: float) -> Generation | None:
    """Return the newest generation in a store; wait for the first."""
    while True:
        generation = Generation.latest(store)
        if generation or time.monotonic() > deadline:
            return generation
        time.sleep(0.02)


def _connect_anew(address: str, port: int, deadline: float) -> dist.Store:
    wait_for_listener(address, port, deadline)
    return connect_to_store(address, port, timedelta(seconds=3))
