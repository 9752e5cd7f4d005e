"""The steps of joining a job: the launch, the store, the members, the monitor, the device, the process group."""

from __future__ import annotations

import logging
import math
import os
import re
import resource
import socket
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..errors import LaunchError
from ..join.members import Member, Members, children_of, usable_cores
from ..join.rendezvous import Generation, StartedByRank, complete_launch, join, raise_if_orphaned
from ..join.session import Session
from ..join.sockets import LOOPBACKS, is_loopback, listen, probe, sockets_beside, sockets_to
from ..join.store import PortTaken, connect, find_master, open_store, reachable, store_outlives_ranks, wait_for_listener
from ..join.store_values import call_with_timeout, without_prefixes
from ..launch.detection import detect_launch
from ..launch.launch import Launch, forgotten_launcher
from ..launch.process_tree import Agent, find_agent, outer_launch, typed_in_terminal
from ..torch_internals import current_group, gloo_address, group_store, reference
from . import current_job
from .device import bind_device, choose_together
from .job import Job, context_of
from .options import Options, Origin

# Tell the ranks that wait for this process why it does not join.

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
        Vacancy: If that job goes on without the rank that this process was started to be.
    """
    try:
        generation = _generation_in(_connect_anew(address, port, time.monotonic() + 2))
        starter = generation.starter() if generation else None
        vacancy = generation.vacancy() if generation else None
    except (OSError, RuntimeError):  # it is no store, or does not answer
        return False
    if vacancy is not None and not vacancy.is_out_of_date:
        raise vacancy
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


# The files that a rank holds open for its connections to the others, and the limit on them.

_OTHERS = 24  # files that joining opens beside one for each connection
_ROOM = 1024  # files that the limit to set leaves for data loaders and logs


def check_open_files(launch: Launch, asked: Options) -> None:
    """Raise if this rank may not open as many files as it has connections to the others."""
    if launch.world_size == 1:
        return
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _connections(launch, asked) + _OTHERS + _open_now()
    if limit == resource.RLIM_INFINITY or needed <= limit:
        return
    raise LaunchError(
        f"Rank {launch.rank} of {launch.world_size} needs about {needed} open files, most of them connections to the "
        f"other ranks, but the limit is {limit}. Raise it in front of the launcher: ulimit -n {needed + _ROOM}"
    )


def _connections(launch: Launch, asked: Options) -> int:
    others = launch.world_size - 1
    count = 0
    if asked.backend is None or "gloo" in asked.backend:  # which connects each rank to all others
        count += others
    if asked.watch:
        count += len(children_of(launch.rank, launch.world_size))
    if launch.rank == 0 and asked.origin.store is None and not store_outlives_ranks(launch):
        count += others
    return count


def _open_now() -> int:
    try:
        return len(os.listdir("/dev/fd"))
    except OSError:  # where the system does not tell
        return 0


log = logging.getLogger(__name__)
_OLDEST_TORCH = (2, 6)  # the first with torch.accelerator; also in pyproject.toml


class OpenStore(NamedTuple):
    """The store where the ranks meet, and its address as far as that is known."""

    store: dist.Store
    address: str | None
    port: int | None


# a store that this process hosts stays open, to be joined again; by the address that the launcher tells
_stores: dict[tuple[str | None, int | None], OpenStore] = {}


def offer_store(launch: Launch, store: dist.Store, address: str, port: int) -> None:
    """Let `setup()` join in a store that was opened before."""
    _stores[launch.master_addr, launch.master_port] = OpenStore(store, address, port)


def hosted_store(master: str | None) -> dist.Store | None:
    """Return the store that this process hosts at this "host:port", None if it does not."""
    return next((opened.store for opened in _stores.values() if f"{opened.address}:{opened.port}" == master), None)


def close_stores() -> None:
    """Forget the open stores, after a failure: nobody will come back to them."""
    _stores.clear()


def check_torch(version: str = torch.__version__) -> None:
    """Raise if torch is too old: vendors' builds of it are often installed past pip's own check."""
    release = [int(number) for number in re.findall("[0-9]+", version)[:2]]
    if tuple(release) < _OLDEST_TORCH:
        oldest = ".".join(map(str, _OLDEST_TORCH))
        raise LaunchError(f"ddpkit needs torch {oldest} or newer, found {version}.")


def checked_launch(asked: Options) -> Launch:
    """Return the launch that the caller or the environment describes; if it is refused, tell peers that may wait."""
    launch, warning = asked.origin.launch, ""
    try:
        check_torch()
        if launch is None:
            launch, warning = unnested_launch()
        check_open_files(launch, asked)
    except LaunchError as error:
        tell_peers(error, asked.origin)
        raise
    if warning:
        log.warning("%s", warning)
    return launch


def unnested_launch() -> tuple[Launch, str]:
    """Return the launch that the environment describes, and a warning if it may not be what was meant, else "".

    Raises:
        LaunchError: If it is refused, or nested in another.
    """
    launch = detect_launch(os.environ)
    agent = _agent_of(launch)
    outer = outer_launch(agent.env, launch, os.environ) if agent else None
    if outer:
        raise LaunchError(outer)
    if typed_in_terminal(launch, os.environ, os.getpid()):
        shells = f"{launch.world_size} shells that srun opened"
        return Launch("single", 0, 1, 0, 1, 0, 1), f"This was typed into one of {shells}, so it runs alone"
    return launch, forgotten_launcher(launch) or ""


def _agent_of(launch: Launch) -> Agent | None:
    """Find torchrun's agent above this process; None where there is none."""
    if launch.kind != "torchrun":
        return None
    return find_agent(os.environ, os.getpid())


def assemble(job: Job) -> None:
    """Join the job, filling in `job` step by step, so that what there is can be ended if a step fails."""
    asked = job.asked
    launch = job.launch
    adopted = dist.is_initialized()
    is_host = launch.rank == 0 and asked.origin.store is None and not store_outlives_ranks(launch)
    agent = _agent_of(launch)
    orphaned: Callable[[], str] = asked.origin.lost or (agent.lost if agent else str)
    if adopted:
        opened = OpenStore(group_store(), None, None)
    elif asked.origin.store is not None:
        opened = OpenStore(asked.origin.store, None, None)
    else:
        opened = _open_store(launch, is_host, asked.timeout, orphaned)

    session, members, listener = _join(job, opened, orphaned)
    job.hosts_store = is_host and not adopted
    if asked.watch:
        _start_watch(job, session, members, listener, opened)
    backend_asked = _backend_of_group() if adopted else asked.backend
    device, backend = choose_together(session, job.launch, asked.device, backend_asked)
    bind_device(device)
    set_threads(job, members.sharers(launch.rank), len(usable_cores()))
    if not adopted:
        _make_group(job, session, device, backend)

    master = f"{opened.address}:{opened.port}" if opened.address else None
    job.context = context_of(job.launch, device, backend, master)
    if not re.search("gloo|mpi", backend):  # which reach the CPU
        job.control = device


def _backend_of_group() -> str:
    name = dist.get_backend()
    if name == "undefined":  # init_process_group() was not told one
        return dist.get_backend_config()
    return name


def _open_store(
    launch: Launch,
    is_host: bool,
    timeout: timedelta,
    orphaned: Callable[[], str],
    tries_again: bool = True,
) -> OpenStore:
    address, port = launch.master_addr, launch.master_port
    if (address, port) in _stores:
        return _stores[address, port]
    try:
        if address is None or port is None:
            opened = OpenStore(*find_master(launch, timeout))
        else:
            store = call_with_timeout(
                lambda: open_store(address, port, is_host, timeout),
                math.inf,
                lambda: raise_if_orphaned(orphaned()),
            )
            opened = OpenStore(store, address, port)
    except PortTaken as error:
        if not is_child_of_rank(error.address, error.port, launch.world_size):
            if tries_again and probe(error.address, error.port) is False:  # who was there may have just left
                return _open_store(launch, is_host, timeout, orphaned, tries_again=False)
            refuse_job(error.address, error.port, str(error))  # the other rank 0 and its peers, if they hold the port
            raise LaunchError(str(error)) from None
        opened = OpenStore(dist.HashStore(), error.address, error.port)  # a job of its own, of one rank
    if is_host or address is None:  # others connect anew: by then, another host may be at this address
        _stores[address, port] = opened
    return opened


def _join(job: Job, opened: OpenStore, orphaned: Callable[[], str]) -> tuple[Session, Members, socket.socket | None]:
    """Learn who the members are; return them and, on rank 0, the socket on which its monitor listens."""
    launch = job.launch
    timeout = job.asked.timeout
    listener = None
    address = None
    if job.asked.watch and launch.rank == 0:
        listener, address = _listen_for_monitors(launch, opened)
    run_id = os.environ.get("DDPKIT_RUN_ID") or os.environ.get("TORCHELASTIC_RUN_ID")
    me = Member(launch.rank, launch.world_size, run_id, store_outlives_ranks(launch), job.asked.watch, address)
    try:
        store, members = join(opened.store, me, timeout, orphaned)
    except BaseException:
        if listener:
            listener.close()
        raise
    nodes = members.node_of_each()
    hosts = [members.nodes[node] for node in nodes]
    session = Session(store, me.rank, hosts, timeout, nodes, orphaned)
    session.store_host = job.asked.origin.store_host
    is_agents = job.asked.origin.store is None and me.store_outlives_ranks
    if launch.rank != session.store_host or is_agents:  # this process does not host it
        session.store_connections = connections_to(opened.store)
    job.session = session
    job.group = reference(current_group())
    job.launch = complete_launch(launch, members)
    return session, members, listener


def _listen_for_monitors(launch: Launch, opened: OpenStore) -> tuple[socket.socket, tuple[str, int]]:
    """Open the socket on which the monitor of rank 0 listens, where only those who must can reach it."""
    address, port = opened.address, opened.port
    if address is None:
        address, port = _address_of(opened.store)
    one_node = launch.num_nodes == 1 or launch.local_world_size == launch.world_size
    return listen(reachable(address, port), one_node or is_loopback(address))


def _start_watch(
    job: Job, session: Session, members: Members, listener: socket.socket | None, opened: OpenStore
) -> None:
    """Start the watch, unless rank 0 has none."""
    if members.monitor_address is not None:
        listens = partial(_listen_for_monitors, job.launch, opened)
        job.monitor = current_job.start_watch(session, members, job.asked.timeout, listener, listens)
        session.monitor = weakref.ref(job.monitor)


def _address_of(store: dist.Store) -> tuple[str | None, int | None]:
    """Return where a store is, as far as it tells."""
    server = without_prefixes(store)
    if isinstance(server, dist.TCPStore):
        return server.host, server.port
    return None, None


def connections_to(store: dist.Store) -> set[int]:
    """Return this process's sockets that are connected to a store, as inode numbers."""
    _, port = _address_of(store)
    return set() if port is None else sockets_to(port)


def host_address(store: dist.Store) -> str:
    """Return this host's address as the other ranks of a store reach it."""
    return reachable(*_address_of(store))


def set_threads(job: Job, sharers: int, cores: int) -> None:
    """Divide the cores among the ranks that share them, unless the user or the launcher has decided."""
    asked = job.asked.num_threads
    if asked is None:
        if sharers == 1 or os.environ.get("OMP_NUM_THREADS") or os.environ.get("MKL_NUM_THREADS"):
            return
        asked = max(1, cores // sharers)
        log.info("using %d CPU threads per rank: %d ranks share %d cores", asked, sharers, cores)
    job.threads = torch.get_num_threads(), asked
    torch.set_num_threads(asked)


def _make_group(job: Job, session: Session, device: torch.device, backend: str) -> None:
    launch = job.launch
    options: dict[str, Any] = {"rank": launch.rank, "world_size": launch.world_size}
    options["timeout"] = job.asked.timeout
    if device.index is not None and re.search("nccl|xccl", backend):
        options["device_id"] = device
    job.owns_group = True  # first, for it may be there when a peer's failure is raised
    try:
        with _gloo_on_loopback(launch.num_nodes == 1):
            dist.init_process_group(backend, store=dist.PrefixStore("group", session.store), **options)
    finally:
        job.group = reference(current_group())
    if backend == "gloo":
        session.connections = sockets_beside(gloo_address(current_group()))
    if not _connects_all(backend):
        session.meet(session.count("group made"))
    session.arrive()


def _connects_all(backend: str) -> bool:
    """Return whether making a group connects each rank with each, so that all have come this far, as gloo's does."""
    return "gloo" in backend and not os.environ.get("TORCH_GLOO_LAZY_INIT")


@contextmanager
def _gloo_on_loopback(one_node: bool) -> Iterator[None]:
    """Let gloo take the loopback interface; by itself it takes that of the host's name, which may be dead.

    Where the user names one, that stands, also if another thread does so meanwhile.
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
            if former is not None:  # but empty
                os.environ[variable] = former
