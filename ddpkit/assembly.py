"""Assembles a job in this process, step by step: the launch, the store, the claims, the watch, device and group."""

from __future__ import annotations

import logging
import math
import os
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .ancestry import find_agent, typed_in_terminal
from .connections import dial, is_loopback, listen, sockets
from .devices import agree, bind_device
from .errors import LaunchError
from .failing import fill_error_file
from .joining import Member, denounce, join, place, refuse
from .launchers import Launch, detect_launch, forgotten_launcher, outer_launch
from .patience import aside
from .rendezvous import PortTaken, connect, find_master, reachable
from .store import Session
from .watch import Watch

log = logging.getLogger(__name__)
_OLDEST_TORCH = (2, 6)  # the first with torch.accelerator; also in pyproject.toml
_stores: dict[tuple[str | None, int | None], tuple[dist.Store, str, int]] = {}  # stay open, to be joined again


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


@dataclass
class Job:
    """What `setup()` makes and `teardown()` ends."""

    context: Context
    asked: tuple[str | None, torch.device | None]  # backend and device
    launch: Launch | None = None  # with all places filled in
    session: Session | None = None
    watch: Watch | None = None
    control: torch.device | None = None  # where small control messages travel, if not on the CPU
    owns_group: bool = False
    hosts_store: bool = False
    former_hook: Any = None


def assemble(
    job: Job,
    launch: Launch,
    backend: str | None,
    device: torch.device | None,
    timeout: timedelta,
    num_threads: int | None,
    watch: bool,
) -> None:
    """Joins the job, filling in `job` as it goes, so that what there is can be ended if a step fails."""
    adopted = dist.is_initialized()
    under_agent = launch.kind == "spawn" or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    hosts = launch.rank == 0 and not under_agent
    agent = find_agent(os.environ, os.getpid()) if launch.kind == "torchrun" else None
    orphaned = agent.lost if agent else str
    store, address, port = _adopted_store() if adopted else _open_store(launch, hosts, timeout, orphaned)
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
    session.nodes, session.orphaned = [member.node for member in roster], orphaned
    job.hosts_store = hosts and not adopted
    job.launch = launch = place(launch, me, roster)
    if watch and roster[0].door:
        wire = wire or dial(*roster[0].door, timeout.total_seconds())
        job.watch = Watch(session, roster[0].nonce, wire, fill_error_file)
        job.watch.wait(timeout)
    chosen, backend = agree(session, launch, device, dist.get_backend() if adopted else backend)
    bind_device(chosen)
    sharers = sum((member.node, member.cores) == (me.node, me.cores) for member in roster)
    set_threads(num_threads, sharers, len(me.cores))
    if not adopted:
        job.owns_group = True  # first, for it may be there when a peer's failure is raised
        _make_group(launch, session, chosen, backend, timeout)
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
    check_torch()
    try:
        launch = unnested_launch()
    except LaunchError as error:
        address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
        if address and port.isdecimal():
            denounce(address, int(port), f"A process on {socket.gethostname()} could not join: {error}")
        raise
    if typed_in_terminal(launch, os.environ, os.getpid()):
        log.warning("This was typed into one of %d shells that srun opened, so it runs alone", launch.world_size)
        return Launch("single", 0, 1, 0, 1, 0, 1)
    if warning := forgotten_launcher(launch):
        log.warning("%s", warning)
    return launch


def adopted_launch() -> Launch:
    """The launch of a group that somebody else made: the environment's if it agrees, else what the group tells."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    try:
        launch = detect_launch(os.environ)
        if (launch.rank, launch.world_size) == (rank, world_size):
            return launch
    except LaunchError:
        pass
    evidence = ("a process group that was there before",)
    return Launch("platform", rank, world_size, None, None, None, None, None, None, evidence)


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
    if address is None or port is None:
        opened = find_master(launch, timeout)
    else:
        try:
            store = aside(lambda: connect(address, port, hosts, timeout), math.inf, lambda: refuse(orphaned()))
            opened = store, address, port
        except PortTaken as error:
            denounce(address, port, str(error))  # the other rank 0 and its peers, if that is what holds the port
            raise LaunchError(str(error)) from None
    _stores[launch.master_addr, launch.master_port] = opened
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


def _adopted_store() -> tuple[dist.Store, None, None]:
    return dist.distributed_c10d._get_default_store(), None, None


def _make_group(launch: Launch, session: Session, device: torch.device, backend: str, timeout: timedelta) -> None:
    options: dict[str, Any] = {"rank": launch.rank, "world_size": launch.world_size, "timeout": timeout}
    if device.index is not None and re.search("nccl|xccl", backend):
        options["device_id"] = device
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    pin = launch.num_nodes == 1 and loopback and not os.environ.get("GLOO_SOCKET_IFNAME")
    if pin:  # gloo would take the interface that the host name resolves to, which may be dead
        os.environ["GLOO_SOCKET_IFNAME"] = str(loopback)
    before = sockets()
    try:
        dist.init_process_group(backend, store=dist.PrefixStore("group", session.store), **options)
    finally:
        session.connections = sockets() - before if backend == "gloo" else set()
        if pin:
            del os.environ["GLOO_SOCKET_IFNAME"]
