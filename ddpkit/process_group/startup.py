"""Assembles a job in this process, step by step: the launch, the store, the claims, the watch, device and group."""

from __future__ import annotations

import logging
import math
import os
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..errors import LaunchError
from ..launch.launchers import Launch, detect_launch, forgotten_launcher, outer_launch
from ..launch.process_tree import find_agent, typed_in_terminal
from ..torch_internals import current_group, group_store, no_group, reference
from .devices import agree, bind_device
from .monitor import Watch
from .on_failure import fill_error_file
from .polling import aside
from .rendezvous import Member, call_off, denounce, join, place, refuse, refuse_child
from .session import Session
from .sockets import dial, is_loopback, listen, sockets
from .tcp_store import PortTaken, connect, find_master, reachable

log = logging.getLogger(__name__)
_OLDEST_TORCH = (2, 6)  # the first with torch.accelerator; also in pyproject.toml
# what this process hosts stays open, to be joined again
_stores: dict[tuple[str | None, int | None], tuple[dist.Store, str, int]] = {}


@dataclass(frozen=True)
class Context:
    """Where this process stands in the job, as `setup()` found it; prints as a block for the log."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    num_nodes: int
    device: torch.device
    backend: str | None
    launcher: str
    master: str | None

    def __str__(self) -> str:
        rows = {
            "launcher": self.launcher,
            "backend": self.backend or "none (one process)",
            "world size": f"{self.world_size} on {self.num_nodes} node{'s' * (self.num_nodes > 1)}",
            "rank": self.rank,
            "local rank": f"{self.local_rank} of {self.local_world_size} on node {self.node_rank}",
            "device": self.device,
            "master": self.master or "none",
        }
        return "\n".join(f"{name:>10}: {value}" for name, value in rows.items())


@dataclass(frozen=True)
class Options:
    """The arguments of `setup()`."""

    backend: str | None = None
    device: torch.device | None = None
    timeout: timedelta = timedelta(minutes=10)
    num_threads: int | None = None
    watch: bool = True


@dataclass
class Job:
    """What `setup()` makes and `teardown()` ends."""

    context: Context
    asked: Options
    group: Callable[[], Any] = no_group  # the process group that it belongs to; one process has none
    launch: Launch | None = None  # with all places filled in
    session: Session | None = None
    watch: Watch | None = None
    control: torch.device | None = None  # where small control messages travel, if not on the CPU
    owns_group: bool = False
    hosts_store: bool = False
    former_hook: Any = None
    former_error: int = 0  # identity of the exception that had ended something in this interpreter before
    interrupted: bool = False  # whether it was left while a KeyboardInterrupt was handled
    finalizer: Any = None


def assemble(job: Job, launch: Launch) -> None:
    """Join the job, filling in `job` as it goes, so that what there is can be ended if a step fails."""
    timeout, watch = job.asked.timeout, job.asked.watch
    adopted = dist.is_initialized()
    under_agent = has_agent(launch)
    hosts = launch.rank == 0 and not under_agent
    agent = find_agent(os.environ, os.getpid()) if launch.kind == "torchrun" else None
    orphaned = agent.lost if agent else str
    store, address, port = (group_store(), None, None) if adopted else _open_store(launch, hosts, timeout, orphaned)
    wire, door = None, None
    if watch and launch.rank == 0:
        wire, door = _open_door(launch, store, address, port)
    try:
        run_id = os.environ.get("DDPKIT_RUN_ID") or os.environ.get("TORCHELASTIC_RUN_ID")
        me = Member(launch.rank, launch.world_size, run_id, under_agent, watch, door)
        room, roster = join(store, me, timeout, orphaned)
    except BaseException:
        if wire:
            wire.close()
        raise
    job.session = session = Session(room, me.rank, [member.host for member in roster], timeout)
    job.group = reference(current_group())
    session.nodes, session.orphaned = [member.node for member in roster], orphaned
    job.hosts_store = hosts and not adopted
    job.launch = launch = place(launch, me, roster)
    if watch and roster[0].door:
        wire = wire or dial(*roster[0].door, timeout.total_seconds())
        job.watch = Watch(session, roster[0].nonce, wire, fill_error_file)
        job.watch.wait(timeout)
    chosen, backend = agree(session, launch, job.asked.device, dist.get_backend() if adopted else job.asked.backend)
    bind_device(chosen)
    sharers = sum((member.node, member.cores) == (me.node, me.cores) for member in roster)
    set_threads(job.asked.num_threads, sharers, len(me.cores))
    if not adopted:
        job.owns_group = True  # first, for it may be there when a peer's failure is raised
        try:
            _make_group(launch, session, chosen, backend, timeout)
        finally:
            job.group = reference(current_group())
        # a rank that leaves at once would close its connections while others still make theirs
        session.meet(session.count("group made"))
    job.context = context_of(launch, chosen, backend, f"{address}:{port}" if address else None)
    job.control = None if re.search("gloo|mpi", backend) else chosen


def check_torch(version: str = torch.__version__) -> None:
    """Raises if torch is too old: vendors' builds of it are often installed past pip's own check."""
    from packaging.version import Version

    if Version(version).release < _OLDEST_TORCH:
        raise LaunchError(f"ddpkit needs torch {'.'.join(map(str, _OLDEST_TORCH))} or newer, found {version}.")


def unnested_launch() -> Launch:
    """The launch that the environment describes; raises if it is refused or nested in another."""
    launch = detect_launch(os.environ)
    agent = find_agent(os.environ, os.getpid()) if launch.kind == "torchrun" else None
    if agent and (outer := outer_launch(agent.env, launch, os.environ)):
        raise LaunchError(outer)
    return launch


def checked_launch() -> Launch:
    """The launch that the environment describes, unless it is nested in another; peers that may wait are told."""
    try:
        check_torch()
        launch = unnested_launch()
    except LaunchError as error:
        warn_peers(error)
        raise
    if typed_in_terminal(launch, os.environ, os.getpid()):
        log.warning("This was typed into one of %d shells that srun opened, so it runs alone", launch.world_size)
        return Launch("single", 0, 1, 0, 1, 0, 1)
    if warning := forgotten_launcher(launch):
        log.warning("%s", warning)
    return launch


def warn_peers(error: Exception) -> None:
    """Tell the ranks that may wait for this process why it does not join them."""
    who, patience = "A process", 2.0
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    several = None  # this process's launch, if there are others that may wait
    with suppress(LaunchError):
        launch = detect_launch(os.environ)
        address, port = launch.master_addr, str(launch.master_port)
        if launch.world_size > 1:
            several = launch
            who, patience = f"Rank {launch.rank}", 20.0  # rank 0 may still be starting
    reason = f"{who} on {socket.gethostname()} could not join: {error}"
    if several and several.rank == 0 and address and not has_agent(several):
        with suppress(OSError, RuntimeError):
            store = connect(address, int(port), True, timedelta(seconds=5))
            call_off(store, several.world_size, reason)
            return
    if address and port.isdecimal():
        denounce(address, int(port), reason, patience, several)


def has_agent(launch: Launch) -> bool:
    """Return whether the process that started the ranks hosts the store, and outlives their restart."""
    return launch.kind == "spawn" or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def context_of(launch: Launch, device: torch.device, backend: str | None = None, master: str | None = None) -> Context:
    """What `setup()` returns."""
    local_rank, local_world_size = launch.local_rank or 0, launch.local_world_size or 1
    node_rank, num_nodes = launch.node_rank or 0, launch.num_nodes or 1
    place = (launch.rank, launch.world_size, local_rank, local_world_size, node_rank, num_nodes)
    return Context(*place, device, backend, launch.kind, master)


def set_threads(asked: int | None, sharers: int, cores: int) -> None:
    """Divides the cores among the ranks that share them, unless the user or the launcher has decided."""
    if asked is None and (sharers == 1 or os.environ.get("OMP_NUM_THREADS") or os.environ.get("MKL_NUM_THREADS")):
        return
    threads = asked or max(1, cores // sharers)
    torch.set_num_threads(threads)
    if asked is None:
        log.info("CPU threads of each rank: %d, for %d ranks share %d cores", threads, sharers, cores)


def offer_store(launch: Launch, store: dist.Store, address: str, port: int) -> None:
    """Lets `setup()` join in a store that was opened before."""
    _stores[launch.master_addr, launch.master_port] = store, address, port


def close_stores() -> None:
    """Forgets the open stores, after a failure: nobody will come back to them."""
    _stores.clear()


def _open_store(
    launch: Launch, hosts: bool, timeout: timedelta, orphaned: Callable[[], str]
) -> tuple[dist.Store, str, int]:
    address, port = launch.master_addr, launch.master_port
    if (address, port) in _stores:
        return _stores[address, port]
    try:
        if address is None or port is None:
            opened = find_master(launch, timeout)
        else:
            store = aside(lambda: connect(address, port, hosts, timeout), math.inf, lambda: refuse(orphaned()))
            opened = store, address, port
    except PortTaken as error:
        if not refuse_child(error.address, error.port, launch.world_size):
            denounce(error.address, error.port, str(error))  # the other rank 0 and its peers, if they hold the port
            raise LaunchError(str(error)) from None
        opened = dist.HashStore(), error.address, error.port  # a job of its own, of one rank
    if hosts or address is None:  # others connect anew: by then, another host may be at this address
        _stores[address, port] = opened
    return opened


def _open_door(
    launch: Launch, store: dist.Store, address: str | None, port: int | None
) -> tuple[socket.socket, tuple[str, int]]:
    """Open the listener of rank 0's watch, where only those who must can reach it."""
    if address is None:
        address, port = _address_of(store)
    one_node = launch.num_nodes == 1 or launch.local_world_size == launch.world_size
    return listen(reachable(address, port), one_node or is_loopback(address))


def _address_of(store: dist.Store) -> tuple[str | None, int | None]:
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if isinstance(store, dist.TCPStore):
        return store.host, store.port
    return None, None


def _make_group(launch: Launch, session: Session, device: torch.device, backend: str, timeout: timedelta) -> None:
    options: dict[str, Any] = {"rank": launch.rank, "world_size": launch.world_size, "timeout": timeout}
    if device.index is not None and re.search("nccl|xccl", backend):
        options["device_id"] = device
    before = sockets()
    with _gloo_on_loopback(launch.num_nodes == 1):
        try:
            dist.init_process_group(backend, store=dist.PrefixStore("group", session.store), **options)
        finally:
            session.connections = sockets() - before if backend == "gloo" else set()


@contextmanager
def _gloo_on_loopback(one_node: bool) -> Iterator[None]:
    """Let gloo take the loopback interface; by itself it takes that of the host's name, which may be dead.

    Where the user names one, that stands, also if another thread does so meanwhile.
    """
    name, former = "GLOO_SOCKET_IFNAME", os.environ.get("GLOO_SOCKET_IFNAME")
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if not one_node or former or loopback is None:
        yield
        return
    os.environ[name] = loopback
    try:
        yield
    finally:
        if os.environ.get(name) == loopback:
            os.environ.pop(name)
            if former is not None:
                os.environ[name] = former
