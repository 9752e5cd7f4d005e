"""Opening the store where the ranks of a job meet: who hosts it, where it is, and what to say when it cannot be
reached.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import time
from datetime import timedelta

import torch.distributed as dist

from ..errors import LaunchError
from ..launch.launchers import Launch, derive_port
from .polling import aside

log = logging.getLogger(__name__)
_NAME_PATIENCE = 60.0  # seconds: a headless service's name may appear late
_JOB_IDS = (  # what differs between jobs that launchers run on one node at a time
    "OMPI_MCA_ess_base_jobid",
    "PMIX_NAMESPACE",
    "PMI_JOBID",
    "SUBMITIT_LOCAL_JOB_ID",
    "FLUX_JOB_ID",
    "LSB_JOBID",
    "HOROVOD_GLOO_RENDEZVOUS_PORT",
)
_GREETING = 60.0  # seconds that a store under load may take to answer


class PortTaken(LaunchError):
    """Rank 0 found somebody else at MASTER_PORT."""

    def __init__(self, message: str, address: str = "", port: int = 0) -> None:
        super().__init__(message)
        self.address, self.port = address, port


def connect(address: str, port: int, host: bool, timeout: timedelta) -> dist.Store:
    """Opens the job's store: as its host, or as a client that waits for the host to come up."""
    deadline = time.monotonic() + timeout.total_seconds()
    _resolve(address, min(_NAME_PATIENCE, timeout.total_seconds()))
    if host:
        try:
            return dist.TCPStore(address, port, is_master=True, wait_for_workers=False, timeout=timeout)
        except RuntimeError as error:  # torch 2.6 raises no DistNetworkError here
            if "EADDRINUSE" not in str(error):
                raise LaunchError(f"Rank 0 cannot host the store at {address}:{port}: {error}") from error
            raise PortTaken(
                f"Rank 0 on {socket.gethostname()} (pid {os.getpid()}) cannot host the store: port {port} of {address} "
                "is taken. Do two processes have RANK=0, or two jobs this MASTER_PORT? Give each job its own.",
                address,
                port,
            ) from error
    knock(address, port, deadline)
    return client(address, port, timeout)


def client(address: str, port: int, timeout: timedelta) -> dist.Store:
    """A client of the store at this address; a stranger there is an error, also one that never answers."""
    try:  # torch waits without a bound for the answer to its greeting
        patience = min(timeout.total_seconds(), _GREETING)
        return aside(lambda: dist.TCPStore(address, port, is_master=False, timeout=timeout), patience)
    except (RuntimeError, TimeoutError) as error:
        raise LaunchError(f"What listens at {address}:{port} is not the store of a job: {error}.") from None


def find_master(launch: Launch, timeout: timedelta) -> tuple[dist.Store, str, int]:
    """Opens the store where the launcher gives no MASTER_ADDR: over hydra's key-value space, or on the only node."""
    one_node = launch.local_world_size == launch.world_size
    address = "127.0.0.1" if one_node else socket.getfqdn()
    if "PMI_FD" in os.environ:
        store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False) if launch.rank == 0 else None
        try:
            address, _, text = _over_pmi(f"{address}|{store.port}" if store else None).partition("|")
        except OSError as error:
            raise LaunchError(
                f"The MPI launcher does not answer on the descriptor in PMI_FD ({error}). Is this a process that a "
                "rank has started? It inherits the launcher's variables but is no rank: start it without PMI_RANK and "
                "PMI_SIZE."
            ) from error
        return store or connect(address, int(text), False, timeout), address, int(text)
    if not one_node:
        raise LaunchError(
            f"{launch.kind} started ranks on several nodes and tells no address to meet at. Set MASTER_ADDR to the "
            "host of rank 0 and MASTER_PORT to a free port there: mpirun -x MASTER_ADDR=node1 -x MASTER_PORT=29400 ..."
        )
    port = derive_port(*(os.environ.get(name, "") for name in _JOB_IDS))
    return connect(address, port, launch.rank == 0, timeout), address, port


def _over_pmi(value: str | None) -> str:
    """Gives rank 0's value to all ranks by the PMI-1 wire protocol, which hydra speaks on a descriptor that it hands
    down.
    """
    with os.fdopen(os.dup(int(os.environ["PMI_FD"])), "r+b", buffering=0) as wire:

        def ask(command: str) -> dict[str, str]:
            wire.write(f"cmd={command}\n".encode())
            line = b""
            while not line.endswith(b"\n"):
                if not (data := wire.read(4096)):
                    raise LaunchError(
                        "The MPI launcher closed its PMI connection. Set MASTER_ADDR and MASTER_PORT instead."
                    )
                line += data
            return dict(word.split("=", 1) for word in line.decode().split() if "=" in word)

        ask("init pmi_version=1 pmi_subversion=1")
        space = ask("get_my_kvsname")["kvsname"]
        if value is not None:
            ask(f"put kvsname={space} key=ddpkit value={value}")
        ask("barrier_in")
        answer = ask(f"get kvsname={space} key=ddpkit")["value"]
        ask("finalize")
        return answer


def reachable(address: str | None, port: int | None) -> str:
    """The address of this host as the other ranks reach it: that of its end of a connection to the store."""
    if address is None or port is None:
        return socket.gethostname()
    with socket.create_connection((address, port), timeout=10) as wire:
        mine = str(wire.getsockname()[0])
    return address if mine in ("::1",) or mine.startswith("127.") else mine


def _resolve(address: str, patience: float) -> None:
    if not re.fullmatch(r"[\w.:%-]+", address):
        raise LaunchError(f"MASTER_ADDR={address!r} is neither a host name nor an address. Set it to rank 0's host.")
    deadline = time.monotonic() + patience
    while True:
        try:
            socket.getaddrinfo(address, None)
            return
        except socket.gaierror as error:
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"MASTER_ADDR={address!r} did not resolve within {patience:g} s: {error}. Is it rank 0's host?"
                ) from None
            log.warning("MASTER_ADDR=%r does not resolve yet (%s); trying again", address, error)
            time.sleep(min(2.0, max(0.0, deadline - time.monotonic())))


def knock(address: str, port: int, deadline: float) -> None:
    """Waits until somebody listens; torch's own client would log C++ stacks and wait for twice the time-out."""
    start, pause, told = time.monotonic(), 0.02, False
    while True:
        left = deadline - time.monotonic()
        try:
            return socket.create_connection((address, port), timeout=max(0.1, min(left, 5.0))).close()
        except OSError as error:
            if left <= 0:
                raise LaunchError(
                    f"Nobody answers at MASTER_ADDR:MASTER_PORT {address}:{port} after {time.monotonic() - start:.0f}"
                    f" s ({error}). Is rank 0 running there, and the port open?"
                ) from None
        if not told and time.monotonic() - start > 5:
            log.warning("waiting for rank 0 at %s:%d", address, port)
            told = True
        time.sleep(pause)
        pause = min(1.5 * pause, 1.0)
