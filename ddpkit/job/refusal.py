"""Tell the ranks that wait for this process why it does not join."""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from ..errors import LaunchError
from ..join.rendezvous import Generation, StartedByRank
from ..join.store import connect, open_store, store_outlives_ranks, wait_for_listener
from ..launch.detection import detect_launch
from ..launch.launch import Launch
from .job import Origin

_HOST_STAYS = 5.0  # seconds, at most, in which the ranks read why rank 0 does not join
_OPENING = 0.5  # seconds from when a store is opened until a job is in it
_STRANGER, _RANK = 2.0, 20.0  # seconds in which the job must begin: rank 0 may still be starting


def tell_peers(error: Exception, origin: Origin) -> None:
    """Tell the ranks that may wait for this process why it does not join them."""
    who = "A process"
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    launch = None  # this process's, if there are others that may wait
    with suppress(LaunchError):
        found = origin.launch or detect_launch(os.environ)
        address, port = found.master_addr, str(found.master_port)
        if found.world_size > 1:
            launch = found
            who = f"Rank {launch.rank}"
    reason = f"{who} on {socket.gethostname()} could not join: {error}"
    if launch and origin.store is not None:
        _refuse_in_store(origin.store, reason, launch)
        return
    if not address or not port.isdecimal():
        return
    if launch and launch.rank == 0 and not store_outlives_ranks(launch):
        with suppress(OSError, RuntimeError):
            _host_to_refuse(launch, address, int(port), reason)
            return
    refuse_job(address, int(port), reason, launch)


def _refuse_in_store(store: dist.Store, reason: str, launch: Launch) -> None:
    """Tell a job whose store the caller has passed: as rank 0, that begins it, or one of those that wait for it."""
    with suppress(RuntimeError):
        if launch.rank == 0:
            generation = Generation.new(store)
            generation.fail(reason)
            generation.await_readers(launch.world_size, _HOST_STAYS)
        else:
            _refuse_latest(store, reason, launch, time.monotonic() + _RANK)


def refuse_job(address: str, port: int, reason: str, launch: Launch | None = None) -> None:
    """Tell a job that this process does not belong to it, so that its ranks do not wait.

    Not the job of a rank that started this process: it waits for nobody.

    Args:
        address: Where the job's store is, or will be.
        port: The same.
        reason: What to tell.
        launch: This process's, if it is one of the job's ranks. It does not wait for a job that all ranks refuse.
    """
    deadline = time.monotonic() + (_RANK if launch else _STRANGER)
    with suppress(OSError, RuntimeError):
        _refuse_latest(_connect_anew(address, port, deadline), reason, launch, deadline)


def _refuse_latest(store: dist.Store, reason: str, launch: Launch | None, deadline: float) -> None:
    """Tell the job that is in a store, or will be by the deadline."""
    refusals = _note_refusal(store, launch) if launch else []
    while time.monotonic() < deadline:
        generation = Generation.latest(store)
        if generation:
            _refuse_generation(generation, reason, is_rank=launch is not None)
            return
        if refusals and store.check(refusals):
            return
        time.sleep(0.1)


def is_child_of_rank(address: str, port: int, world_size: int) -> bool:
    """Return whether a rank of the job there started this process, which is then a job of its own of one rank.

    Raises:
        StartedByRank: If this process is to be one of several ranks.
        JobContinues: If that job goes on without the rank that this process was started to be.
    """
    try:
        generation = _generation_in(_connect_anew(address, port, time.monotonic() + 2))
        starter = generation.starter() if generation else None
        continued = generation.continued() if generation else None
    except (OSError, RuntimeError):  # it is no store, or does not answer
        return False
    if continued is not None and not continued.is_out_of_date:
        raise continued
    if starter and world_size > 1:
        raise StartedByRank(starter)
    return starter is not None


def _generation_in(store: dist.Store) -> Generation | None:
    """Return the newest generation in a store; wait a moment for the first, for the store may have just been opened."""
    deadline = time.monotonic() + _OPENING
    while True:
        generation = Generation.latest(store)
        if generation or time.monotonic() > deadline:
            return generation
        time.sleep(0.02)


def _host_to_refuse(launch: Launch, address: str, port: int, reason: str) -> None:
    """Host the store, as rank 0 must, until all ranks have read there why the job cannot be."""
    store = open_store(address, port, True, timedelta(seconds=5))
    generation = Generation.new(store)
    generation.fail(reason)
    generation.await_readers(launch.world_size, _HOST_STAYS)


def _refuse_generation(generation: Generation, reason: str, is_rank: bool) -> None:
    if generation.starter():
        return
    generation.fail(reason)
    if is_rank and not generation.is_complete():
        generation.count_as_reader()


def _note_refusal(store: dist.Store, launch: Launch) -> list[str]:
    """Leave a note that this rank refuses to join; return the keys of all ranks' notes."""
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # an agent's store outlives it
    notes = [f"ddpkit/refusals/{attempt}/{rank}" for rank in range(launch.world_size)]
    store.set(notes[launch.rank], "")
    return notes


def _connect_anew(address: str, port: int, deadline: float) -> dist.Store:
    wait_for_listener(address, port, deadline)
    return connect(address, port, timedelta(seconds=3))
