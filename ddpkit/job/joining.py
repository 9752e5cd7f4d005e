"""Join a job: its store, its members, the watch, the device, the process group; or tell the others why not."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ..errors import LaunchError
from ..launch import detection
from ..launch.launch import Launch
from ..launch.process_tree import agent_of
from ..parsing import parse
from ..rendezvous.causes import cause_of
from ..rendezvous.failures import JobContinues
from ..rendezvous.generation import Generation, StartedByRank, complete_launch, join, raise_if_peer_lost
from ..rendezvous.members import Member, Members, usable_cores
from ..rendezvous.session import Session
from ..rendezvous.sockets import LOOPBACKS, Listener, is_loopback, listen, probe, sockets_to
from ..rendezvous.store import (
    PortTaken,
    call_with_timeout,
    connect_to_store,
    find_master,
    open_store,
    ports,
    reachable,
    store_outlives_ranks,
    wait_for_listener,
    without_prefixes,
)
from ..torch_internals import current_group, group_store, reference
from . import current_job
from .device import bind_device, choose_device, control_device_of, default_backend, identity
from .job import ChooseDevice, Job, OpenStore, context_of

log = logging.getLogger(__name__)
_CHOICE = {"error": str, "device": str, "shared": bool, "backend": str | None, "kind": str}


def offer_store(launch: Launch, store: dist.Store, address: str, port: int) -> None:
    """Let `setup()` join through a store that was opened before."""
    current_job.open_stores[launch.master_addr, launch.master_port] = OpenStore(store, address, port, _host_of(launch))


def _host_of(launch: Launch) -> int | None:
    """Return the rank that hosts the store; None if the process that started the ranks does."""
    return None if store_outlives_ranks(launch) else 0


def hosted_store(master: str | None) -> dist.Store | None:
    """Return the store that this process hosts at this "host:port"; None if there is none."""
    return next((opened.store for opened in current_job.open_stores.values() if opened.master == master), None)


def assemble(job: Job, opened: OpenStore | None = None) -> None:
    """Join the job, filling in `job` step by step, so that a failed step can end what exists.

    Args:
        job: The job.
        opened: Its store, if it is already open.
    """
    launch, backend = job.launch, job.asked.backend
    adopted = dist.is_initialized()
    if agent := agent_of(launch):
        job.peer_lost = agent.lost
    if adopted:
        opened = OpenStore(group_store(), host=None)
        backend = _backend_of_group()

    opened = opened or _open_store(job)
    session, members = join_and_watch(job, opened)
    device, backend = choose_together(session, job.launch, job.asked.device, backend)
    bind_device(device)
    job.set_threads(members.sharers[launch.rank], len(usable_cores()))
    if not adopted:
        _make_group(job, session, device, backend)

    job.context = context_of(job.launch, device, backend, opened.master)
    job.control = control_device_of(dist.get_backend_config(), device)


def _backend_of_group() -> str:
    name = dist.get_backend()
    return dist.get_backend_config() if name == "undefined" else name  # init_process_group() was called without one


def _open_store(job: Job, tries_again: bool = True) -> OpenStore:
    launch = job.launch
    place = launch.master_addr, launch.master_port
    known: OpenStore | None = current_job.open_stores.get(place)
    if known is not None:
        return known
    check = partial(raise_if_peer_lost, job.peer_lost)
    try:
        found = call_with_timeout(lambda: find_master(launch, job.asked.timeout), math.inf, check)
        opened = OpenStore(*found, _host_of(launch))
    except PortTaken as error:
        if not is_child_of_rank(error.address, error.port, launch.world_size):
            if tries_again and probe(error.address, error.port) is False:  # its user may have just left
                return _open_store(job, tries_again=False)
            refuse_job(error.address, error.port, str(error))  # the other rank 0 and its peers, if they hold the port
            raise LaunchError(str(error)) from None
        opened = OpenStore(dist.HashStore(), error.address, error.port)  # a separate job of one rank
    if launch.rank == opened.host or launch.master_addr is None:  # others connect again: it may be another host by then
        current_job.open_stores[place] = opened
    return opened


def join_and_watch(job: Job, opened: OpenStore) -> tuple[Session, Members]:
    """Find the members, and start the watch, unless rank 0 has none."""
    launch, timeout, watched = job.launch, job.asked.timeout, job.asked.watch
    listener = address = None
    if watched and launch.rank == 0:
        listener, address = _listen_for_watches(launch, opened)
    run_id = os.environ.get("DDPKIT_RUN_ID") or os.environ.get("TORCHELASTIC_RUN_ID") or None
    me = Member(launch.rank, launch.world_size, run_id, store_outlives_ranks(launch), watched, address)
    try:
        store, members = join(opened.store, me, timeout, job.peer_lost)
    except BaseException:
        if listener:
            listener.close()
        raise
    place = me.rank, members.hosts, timeout, members.node_of
    connections = connections_to(opened.store)
    job.session = session = Session(store, *place, job.peer_lost, cause_of, opened.host or 0, connections)
    job.hosts_store = launch.rank == opened.host
    job.group = reference(current_group())
    job.launch = complete_launch(launch, members)
    if watched and members.watch_address is not None:
        listens = partial(_listen_for_watches, job.launch, opened)
        current_job.start_watch(job, session, members, listener, listens)
    return session, members


def _listen_for_watches(launch: Launch, opened: OpenStore) -> Listener:
    """Open the socket where rank 0's watch listens, reachable only for those who need it."""
    address, port = (opened.address, opened.port) if opened.address else _address_of(opened.store)
    one_node = launch.num_nodes == 1 or launch.local_world_size == launch.world_size
    return listen(reachable(address, port), one_node or is_loopback(address))


def _address_of(store: dist.Store) -> tuple[str | None, int | None]:
    """Return a store's address, if it has one."""
    server = without_prefixes(store)
    return (server.host, server.port) if isinstance(server, dist.TCPStore) else (None, None)


def connections_to(store: dist.Store) -> set[int]:
    """Return this process's sockets connected to a store, as inode numbers."""
    _, port = _address_of(store)
    if port is None:
        return set()
    ports.add(port)
    return sockets_to(port)


def host_address(store: dist.Store) -> str:
    """Return this host's address as the other ranks of a store reach it."""
    return reachable(*_address_of(store))


def _make_group(job: Job, session: Session, device: torch.device, backend: str) -> None:
    launch = job.launch
    options: dict[str, Any] = {"rank": launch.rank, "world_size": launch.world_size, "timeout": job.asked.timeout}
    if device.index is not None and re.search("nccl|xccl", backend):
        options["device_id"] = device
    job.owns_group = True  # first: a peer's failure may be raised when the group already exists
    try:
        with _gloo_on_loopback(launch.num_nodes == 1):
            dist.init_process_group(backend, store=dist.PrefixStore("group", session.store), **options)
    finally:
        job.group = reference(current_group())
    if backend == "gloo":
        session.follow_connections(current_group())
    session.barrier(session.count("group made"))  # leaving now would break connections that others still make


@contextmanager
def _gloo_on_loopback(one_node: bool) -> Iterator[None]:
    """Make gloo use the loopback interface; by default it uses that of the host's name, which may be down.

    A user's choice stays, even if another thread makes it meanwhile.
    """
    variable = "GLOO_SOCKET_IFNAME"
    former = os.environ.get(variable)
    loopbacks = [name for _, name in socket.if_nameindex() if name in LOOPBACKS]
    if former or not one_node or not loopbacks:
        yield
        return
    os.environ[variable] = loopbacks[0]
    try:
        yield
    finally:
        if os.environ.get(variable) == loopbacks[0]:
            del os.environ[variable]
            if former is not None:  # set, but empty
                os.environ[variable] = former


def choose_together(
    session: Session, launch: Launch, device: torch.device | ChooseDevice | None, backend: str | None
) -> tuple[torch.device, str]:
    """Choose this rank's device and the backend of all. Collective.

    Raises:
        LaunchError: On every rank, if one has no device, or their devices or backends do not fit together.
    """
    chosen, name, problem = torch.device("cpu"), "", ""
    try:
        chosen = choose_device(device, launch.local_rank or 0, launch.local_world_size or 1)
        name = identity(chosen)
        default_backend(chosen, False)
    except (RuntimeError, ValueError) as error:
        problem = str(error)
    asked = {"shared": device is not None, "backend": backend}
    choice = {"error": problem, "device": name, "kind": chosen.type, **asked}
    texts = session.exchange(json.dumps(choice), "devices")
    read = {text: parse(text, f"choice of rank {texts.index(text)}", _CHOICE) for text in set(texts)}
    choices = [read[text] for text in texts]
    _check_choices(choices)
    shared = _check_sharing(session, choices)
    return chosen, backend or default_backend(chosen, shared)


def _check_choices(choices: list[dict[str, Any]]) -> None:
    """Raise if the ranks' choices do not fit together."""
    errors = [f"rank {rank}: {choice['error']}" for rank, choice in enumerate(choices) if choice["error"]]
    if errors:
        raise LaunchError("; ".join(errors))
    for key, name in (("kind", "device types"), ("backend", "backends")):
        values = [choice[key] for choice in choices]
        if len(set(values)) > 1:
            found = ", ".join(f"rank {rank} {value}" for rank, value in enumerate(values))
            raise LaunchError(
                f"The ranks use different {name}: {found}. Set one for all: setup(device=..., backend=...)."
            )


def _check_sharing(session: Session, choices: list[dict[str, Any]]) -> bool:
    """Return whether ranks share an accelerator; raise if one of them did not request it."""
    holders: dict[tuple[object, str], list[int]] = {}
    for rank, choice in enumerate(choices):
        if choice["device"]:
            holders.setdefault((session.nodes[rank], choice["device"]), []).append(rank)
    shared = [ranks for ranks in holders.values() if len(ranks) > 1]
    for ranks in shared:
        if not all(choices[rank]["shared"] for rank in ranks):
            host, kind = session.hosts[ranks[0]], choices[ranks[0]]["kind"]
            raise LaunchError(
                f"Ranks {ranks} on {host} see the same accelerator: {len(ranks)} ranks, 1 {kind} device. Start "
                f'one rank per device, or share it explicitly: setup(device="{kind}:0").'
            )
    return bool(shared)


# Tell waiting ranks why this process does not join.

_READING = 5.0  # most seconds in which the ranks read why rank 0 does not join
_OPENING = 0.5  # seconds from the opening of a store until a job is in it
_STRANGER, _RANK = 2.0, 20.0  # seconds in which the job must start: rank 0 may still be starting


def tell_peers(error: Exception, launch: Launch | None) -> None:
    """Tell the ranks that may wait for this process why it does not join them."""
    with suppress(LaunchError):
        launch = launch or detection.detect_launch(os.environ)
    who, address, port = "A process", os.environ.get("MASTER_ADDR"), detection.port(os.environ.get("MASTER_PORT"))
    if launch is not None:  # else the environment is contradictory
        who, address, port = f"Rank {launch.rank}", launch.master_addr, launch.master_port or 0
    if not address or not port or (launch and launch.world_size == 1):
        return
    reason = f"{who} on {socket.gethostname()} could not join: {error}"
    if launch is not None and launch.rank == 0:
        _refuse_as_rank_0(launch, address, port, reason)
    else:
        refuse_job(address, port, reason, is_rank=launch is not None)


def _refuse_as_rank_0(launch: Launch, address: str, port: int, reason: str) -> None:
    """Start the job that the others wait for, and cancel it."""
    with suppress(OSError, RuntimeError):
        is_host = not store_outlives_ranks(launch)
        generation = Generation.new(open_store(address, port, is_host, timedelta(seconds=_READING)))
        generation.fail(reason)
        if is_host:
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
