"""Starts and ends the job in this process: the only code that makes or destroys a process group."""

from __future__ import annotations

import atexit
import logging
import os
import re
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from . import ranks
from .devices import agree, bind_device, choose_device
from .errors import LaunchError, NotSetUpError
from .failing import cause_of, fill_error_file, publish
from .joining import PLACE, Member, denounce, join, place
from .launchers import Launch, detect_launch, forgotten_launcher, outer_launch, read_agent_env
from .rendezvous import PortTaken, connect, find_master, reachable
from .store import Session
from .watch import Watch, dial, listen

log = logging.getLogger(__name__)


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
class _Job:
    """What `setup()` made and `teardown()` ends."""

    context: Context
    session: Session | None = None
    watch: Watch | None = None
    owns_group: bool = False
    hosts_store: bool = False
    former_hook: Any = None


_job: _Job | None = None
_stores: dict[tuple[str, int], dist.Store] = {}  # stay open after teardown(), so that the ranks can join again


def setup(
    *,
    backend: str | None = None,
    device: str | torch.device | None = None,
    timeout: timedelta = timedelta(minutes=10),
    num_threads: int | None = None,
    watch: bool = True,
) -> Context:
    """Joins the job that the environment describes, binds this rank's device and makes the process group. Collective.

    On one process it only chooses the device. A second call returns what the first made; a group that somebody else
    made is adopted, and left alone by `teardown()`.

    Args:
        backend: Backend of the process group, as torch names it; by default what suits the device: "gloo" on CPUs, for
            example "cpu:gloo,cuda:nccl" on GPUs.
        device: This rank's device. By default the accelerator whose index is the local rank, the only visible one, or
            the CPU where there is none. Ranks may share an accelerator only if they name it here.
        timeout: Bound on joining, on each later wait, and the group's time-out for collectives.
        num_threads: Threads of each rank's CPU operators. By default the launcher's choice (`OMP_NUM_THREADS`), else
            the cores that this rank may use divided among the ranks that share them.
        watch: Whether a thread learns of failures on other ranks while this one computes or sits in a collective.

    Returns:
        Where this process stands.

    Raises:
        LaunchError: If the environment's hints are incomplete or contradictory, the launch is nested, or the ranks do
            not fit
            together: on every rank that can be reached.
        ValueError: If an argument cannot be used.

    Example:
        >>> context = setup()
        >>> context.rank, context.world_size
        (0, 1)
        >>> teardown()
    """
    global _job
    if not isinstance(timeout, timedelta) or timeout <= timedelta(0):
        raise ValueError(f"timeout must be a positive datetime.timedelta, got {timeout!r}.")
    if num_threads is not None and (not isinstance(num_threads, int) or num_threads < 1):
        raise ValueError(f"num_threads must be a positive integer, got {num_threads!r}.")
    device = None if device is None else torch.device(device)
    if _job is not None and _job.session is not None and _job.session.pid != os.getpid():
        raise LaunchError("This process was forked from a rank; start ranks with a launcher or with ddpkit.spawn().")
    if _job is not None:
        if (backend or _job.context.backend) != _job.context.backend or (
            device or _job.context.device
        ) != _job.context.device:
            raise ValueError(f"setup() was called before, with another backend or device:\n{_job.context}")
        return _job.context
    launch = _detect()
    if launch.world_size == 1 and launch.master_addr is None and not dist.is_initialized():
        _job = _Job(_context(launch, choose_device(device, 0, 1), None))
        if num_threads:
            torch.set_num_threads(num_threads)
    else:
        _job = _join(launch, backend, device, timeout, num_threads, watch)
        _job.former_hook, sys.excepthook = sys.excepthook, _excepthook
        atexit.register(teardown)
    ranks.set_launch(replace(launch, **{k: getattr(_job.context, k) for k in PLACE}))
    if ranks.is_main_process():
        log.info("joined\n%s", _job.context)
    return _job.context


def teardown() -> None:
    """Leaves the job and destroys the group that `setup()` made; harmless when there is none. Runs at exit by itself.

    It waits for nobody, but rank 0 stays for at most 2 s if it hosts the store and others are still leaving.
    """
    global _job
    if _job is None:
        return
    job, _job = _job, None
    ranks.set_launch(None)
    if job.session is None or job.session.pid != os.getpid():
        return
    atexit.unregister(teardown)
    if sys.excepthook is _excepthook:
        sys.excepthook = job.former_hook
    failed = job.session.told is not None
    if failed:
        _stores.clear()
    if job.watch:
        job.watch.close()
    if job.owns_group and dist.is_initialized():  # first of all: this frees ranks that are stuck in a collective with us
        if failed and "nccl" in str(job.context.backend):
            dist.distributed_c10d._abort_process_group()  # destroying would wait for operations that cannot end
        else:
            dist.destroy_process_group()
    with suppress(RuntimeError):  # the store may have gone with its host
        job.session.leave(linger=job.hosts_store)


@contextmanager
def distributed(**options: Any) -> Iterator[Context]:
    """`setup()` and `teardown()` around a block. Collective.

    When the block raises, the other ranks are told first, torchrun's error file is filled, and nothing waits for the
    group. When it raises because a peer failed, a `PeerError` that names the peer takes the place of the connection
    error.

    Args:
        **options: Those of `setup()`.

    Example:
        >>> with distributed() as context:
        ...     print(context.world_size)
        1
    """
    outermost = _job is None
    context = setup(**options)
    try:
        yield context
    except BaseException as error:
        cause = report(error)
        if cause is not error:
            raise cause from error
        raise
    finally:
        if outermost:
            teardown()


def get_device() -> torch.device:
    """This rank's device: the one that `setup()` bound, before it the one that it would."""
    if _job is not None:
        return _job.context.device
    launch = ranks.current_launch()
    return choose_device(None, launch.local_rank or 0, launch.local_world_size or 1)


def joined() -> bool:
    """Whether there are peers to talk to. Adopts a group that somebody else made.

    Raises:
        NotSetUpError: If several processes were launched but not set up.
    """
    if _job is not None:
        return _job.context.world_size > 1
    if dist.is_available() and dist.is_initialized():
        return setup(watch=False).world_size > 1
    if (world_size := ranks.get_world_size()) > 1:
        raise NotSetUpError(
            f"{world_size} processes were launched ({ranks.current_launch().kind}), but this one has not joined them. "
            "Call ddpkit.setup() first, or wrap main() in `with ddpkit.distributed():`."
        )
    return False


def current_session() -> Session:
    """The session of the joined job; call it only where `joined()` is true."""
    assert _job is not None and _job.session is not None
    return _job.session


def control_device() -> torch.device:
    """Where small control messages travel: the CPU if the group reaches it (gloo), else this rank's accelerator."""
    backend = str(_job.context.backend) if _job else "gloo"
    return torch.device("cpu") if re.search("gloo|mpi", backend) else get_device()


@contextmanager
def peer_errors() -> Iterator[None]:
    """Around torch's collectives: a connection that broke because a peer failed becomes a `PeerError` that names it."""
    try:
        yield
    except RuntimeError as error:
        if _job and _job.session and (cause := cause_of(error, _job.session)):
            raise cause from error
        raise


def report(error: BaseException) -> BaseException:
    """Tells the peers that this rank is failing; returns the error to show, which is a peer's if that was the cause."""
    if isinstance(error, SystemExit) and not error.code:
        return error
    if _job is not None and _job.session is not None and _job.session.pid == os.getpid():
        error = cause_of(error, _job.session) or error
        publish(error, _job.session, _job.watch)
    fill_error_file(error)
    return error


def _excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    former = _job.former_hook if _job else sys.__excepthook__
    shown = report(error)
    if shown is not error:
        shown.__cause__ = error
        kind, trace = type(shown), shown.__traceback__
    former(kind, shown, trace)


def _detect() -> Launch:
    try:
        launch = detect_launch(os.environ)
        agent = read_agent_env(os.environ, os.getpid()) if launch.kind == "torchrun" else None
        if agent and (outer := outer_launch(agent, launch, os.environ)):
            raise LaunchError(outer)
    except LaunchError as error:
        address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
        if address and port.isdecimal():  # peers may be waiting for this process
            denounce(address, int(port), f"A process on {socket.gethostname()} could not join: {error}")
        raise
    if warning := forgotten_launcher(launch):
        log.warning("%s", warning)
    return launch


def _join(
    launch: Launch,
    backend: str | None,
    device: torch.device | None,
    timeout: timedelta,
    num_threads: int | None,
    watch: bool,
) -> _Job:
    adopted = dist.is_initialized()
    under_agent = launch.kind == "spawn" or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    address, port = launch.master_addr, launch.master_port
    if adopted:
        launch = replace(launch, rank=dist.get_rank(), world_size=dist.get_world_size())
        store = dist.distributed_c10d._get_default_store()
    elif address is not None and port is not None:
        store = _open_store(address, port, launch.rank == 0 and not under_agent, timeout)
    else:
        store, address, port = find_master(launch, timeout)
    wire = listen() if watch and launch.rank == 0 else None
    door = (reachable(address, port), wire.getsockname()[1]) if wire else None
    run_id = os.environ.get("DDPKIT_RUN_ID") or os.environ.get("TORCHELASTIC_RUN_ID")
    me = Member(launch.rank, launch.world_size, run_id, under_agent, door)
    room, roster = join(store, me, timeout)
    session = Session(room, me.rank, [member.host for member in roster], timeout)
    launch = place(launch, me, roster)
    job = _Job(
        _context(launch, torch.device("cpu"), None),
        session,
        hosts_store=launch.rank == 0 and not (adopted or under_agent),
    )
    try:
        if watch and roster[0].door:
            near = roster[0].host == me.host
            wire = wire or dial("127.0.0.1" if near else roster[0].door[0], roster[0].door[1], timeout.total_seconds())
            job.watch = Watch(session, roster[0].nonce, wire, fill_error_file)
            job.watch.wait(timeout.total_seconds())
        chosen, backend = agree(session, launch, device, backend if not adopted else dist.get_backend())
        bind_device(chosen)
        _set_threads(
            num_threads, sum(member.host == me.host and member.cores == me.cores for member in roster), len(me.cores)
        )
        if not adopted:
            _make_group(launch, session, chosen, backend, timeout)
        job.owns_group = not adopted
        job.context = _context(launch, chosen, backend, f"{address}:{port}" if address else None)
        return job
    except BaseException as error:
        global _job
        _job = job
        cause = report(error)
        teardown()
        if cause is not error:
            raise cause from error
        raise


def _open_store(address: str, port: int, host: bool, timeout: timedelta) -> dist.Store:
    try:
        if (address, port) not in _stores:
            _stores[address, port] = connect(address, port, host, timeout)
        return _stores[address, port]
    except PortTaken as error:
        denounce(address, port, str(error))  # the other rank 0 and its peers, if that is what holds the port
        raise


def _context(launch: Launch, device: torch.device, backend: str | None, master: str | None = None) -> Context:
    local_rank, local_world_size = launch.local_rank or 0, launch.local_world_size or 1
    node_rank, num_nodes = launch.node_rank or 0, launch.num_nodes or 1
    place = (launch.rank, launch.world_size, local_rank, local_world_size, node_rank, num_nodes)
    return Context(*place, device, backend, launch.kind, master)


def _make_group(launch: Launch, session: Session, device: torch.device, backend: str, timeout: timedelta) -> None:
    options: dict[str, Any] = {}
    if device.index is not None and re.search("nccl|xccl", backend):
        options["device_id"] = device
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    pin = launch.num_nodes == 1 and loopback and not os.environ.get("GLOO_SOCKET_IFNAME")
    if pin:  # gloo would take the interface that the host name resolves to, which may be dead
        os.environ["GLOO_SOCKET_IFNAME"] = str(loopback)
    try:
        store = dist.PrefixStore("group", session.store)
        dist.init_process_group(
            backend, store=store, rank=launch.rank, world_size=launch.world_size, timeout=timeout, **options
        )
    finally:
        if pin:
            del os.environ["GLOO_SOCKET_IFNAME"]


def _set_threads(asked: int | None, sharers: int, cores: int) -> None:
    if asked is None and (sharers == 1 or os.environ.get("OMP_NUM_THREADS") or os.environ.get("MKL_NUM_THREADS")):
        return
    threads = asked or max(1, cores // sharers)
    torch.set_num_threads(threads)
    log.info("%d CPU threads per rank (%d ranks share %d cores)", threads, sharers, cores)
