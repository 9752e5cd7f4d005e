"""Open the store where the ranks of a job meet, wait for it, and read it."""

from __future__ import annotations

import atexit
import itertools
import json
import logging
import os
import re
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from ..errors import LaunchError, printable
from ..launch import detection
from ..launch.launch import JOB_IDS, Launch
from ..parsing import parse, refuse_text
from ..torch_internals import torch_is_before
from . import sockets

T = TypeVar("T")


def polls(seconds: float, ranks: int = 1) -> Iterator[None]:
    """Yield for each poll, and sleep between them: at first 50 µs, then a twentieth of the time waited, at most 20 ms.

    Args:
        seconds: Time limit; the last poll comes after it.
        ranks: Number of ranks that poll: they pause longer, to leave the store time for all of them.
    """
    deadline = time.monotonic() + seconds
    pause = max(50e-6, 60e-6 * (ranks - 7))
    longest = min(max(0.02, 1e-3 * ranks), 1.0)
    while True:
        is_last = time.monotonic() > deadline
        yield
        if is_last:
            return
        time.sleep(pause)
        pause = min(1.05 * pause, longest)


def count_in(store: dist.Store, key: str, expected: int, seconds: float, ranks: int = 1) -> None:
    """Count this process under a key; wait, with a time limit, until as many as expected have."""
    amount = 1
    for _ in polls(seconds, ranks):
        if store.add(key, amount) >= expected:
            return
        amount = 0


ports: set[int] = set()  # of the stores that this process has used
_abandoned: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_AT_EXIT = 1.0  # seconds in which abandoned threads end


@atexit.register
def _end_threads() -> None:
    """Let no thread return from torch's code to an interpreter that has ended: that would abort the process."""
    deadline = time.monotonic() + _AT_EXIT
    waiting = [thread for thread in _abandoned if thread.is_alive()]
    if waiting:
        for port in ports:
            sockets.cut(sockets.sockets_to(port))
    for thread in waiting:
        thread.join(max(0.0, deadline - time.monotonic()))


def call_with_timeout(work: Callable[[], T], seconds: float, check: Callable[[], object] = str) -> T:
    """Call a function in a new thread, and return its value or raise its error.

    Args:
        work: The function. It may never return, if a process that it asks is stopped.
        seconds: Time limit; after it `TimeoutError` is raised and the thread abandoned.
        check: Called about once a second meanwhile; it ends the wait by raising.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    deadline = time.monotonic() + seconds
    try:
        thread.start()
    except RuntimeError:  # Python 3.12.0 and 3.12.1 start no thread at exit
        run()
    else:
        _abandoned.add(thread)  # if it lives on
        while thread.is_alive() and time.monotonic() < deadline:
            thread.join(min(deadline - time.monotonic(), 1.0))
            check()
    if errors:
        raise errors.pop()  # this frame must not keep it, because its traceback keeps the frame
    if not results:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return results[0]


def try_store(work: Callable[[], T], seconds: float) -> T | None:
    """Call a function that uses a store; return None if the store is gone, or its host does not answer in time."""
    with suppress(RuntimeError, TimeoutError):
        return call_with_timeout(work, seconds)
    return None


_PIECE = 1 << 20  # characters of a long text under one key


def read_texts(store: dist.Store, keys: list[str]) -> list[str]:
    """Read texts from the store, in one call.

    Raises:
        LaunchError: If one of them is not text.
    """
    texts = []
    for key, data in zip(keys, store.multi_get(keys), strict=True):
        try:
            texts.append(data.decode())
        except UnicodeDecodeError:
            refuse_text(data, key)
    return texts


def write_list(store: dist.Store, key: str, texts: list[str]) -> list[str]:
    """Write texts of any length, consecutive equal ones once; return the keys. They can be read once `key` exists."""
    runs = [(text, len(list(run))) for text, run in itertools.groupby(texts)]
    joined = json.dumps({"runs": runs}, ensure_ascii=False)
    more = []
    for number, start in enumerate(range(_PIECE, len(joined), _PIECE)):
        more.append(f"{key}/{number}")
        store.set(more[-1], joined[start : start + _PIECE])
    store.set(key, f"{len(more)} {joined[:_PIECE]}")
    return [key, *more]


def read_list(store: dist.Store, key: str, length: int) -> list[str]:
    """Read so many texts from `write_list`.

    Raises:
        LaunchError: If it did not write them.
    """
    (found,) = read_texts(store, [key])
    more, space, text = found.partition(" ")
    if not space or not re.fullmatch("[0-9]{1,4}", more):
        refuse_text(found, key)
    keys = [f"{key}/{number}" for number in range(int(more))]
    if keys:
        text += "".join(read_texts(store, keys))
    runs = parse(text, key, {"runs": [tuple[str, int]]}, values=length)["runs"]
    texts = [one for one, count in runs for _ in range(min(count, length + 1))]
    if len(texts) != length:
        refuse_text(text, key)
    return texts


def without_prefixes(store: dist.Store) -> dist.Store:
    """Return the store itself, which others wrap with a prefix."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


# The key-value space of MPICH's launcher, through which ranks share an address that the environment does not define.
#
# hydra passes each rank a descriptor, in PMI_FD, for the PMI-1 wire protocol.


def share_over_pmi(value: str | None) -> str:
    """Send rank 0's value to all ranks; the others pass None. Collective.

    Raises:
        LaunchError: If the launcher does not answer.
    """
    try:
        with socket.socket(fileno=os.dup(int(os.environ["PMI_FD"]))) as connection:  # raises for a file
            pipe = connection.makefile("rwb", buffering=0)
            _ask(pipe, "init pmi_version=1 pmi_subversion=1")
            space = _ask(pipe, "get_my_kvsname")["kvsname"]
            if value is not None:
                _ask(pipe, f"put kvsname={space} key=ddpkit value={value}")
            _ask(pipe, "barrier_in")
            answer = _ask(pipe, f"get kvsname={space} key=ddpkit")["value"]
            _ask(pipe, "finalize")
            return answer
    except (OSError, ValueError, KeyError, OverflowError) as error:  # what a strange descriptor or answer causes
        raise LaunchError(
            f"The MPI launcher does not answer on the descriptor in PMI_FD ({error}). Did a rank start this process? "
            "It inherits the launcher's variables but is not a rank: start it without PMI_RANK and PMI_SIZE."
        ) from error


def _ask(pipe: socket.SocketIO, command: str) -> dict[str, str]:
    """Send a command; return the fields of the answer, one line of name=value."""
    pipe.write(f"cmd={command}\n".encode())
    line = pipe.readline()
    if not line.endswith(b"\n"):
        raise LaunchError("The MPI launcher closed its PMI connection. Set MASTER_ADDR and MASTER_PORT instead.")
    return dict(word.split("=", 1) for word in line.decode().split() if "=" in word)


log = logging.getLogger(__name__)
_NAME_PATIENCE = 60.0  # seconds: a headless service's name may appear late
_GREETING = 60.0  # seconds for a busy store to answer
_NEWS = 5.0  # seconds after which a wait for rank 0 is logged
_KNOCKING = 1000  # ranks that may wait for one listener


class PortTaken(LaunchError):
    """Rank 0 found MASTER_PORT in use."""

    def __init__(self, message: str, address: str, port: int) -> None:
        super().__init__(message)
        self.address = address
        self.port = port


def store_outlives_ranks(launch: Launch) -> bool:
    """Return whether the process that started the ranks hosts the store, which then survives their restart."""
    agent_hosts = launch.kind == "torchrun" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return agent_hosts or launch.kind == "spawn"


def open_store(address: str, port: int, is_host: bool, timeout: timedelta) -> dist.Store:
    """Open the job's store: as its host, or as a client that waits for the host to come up."""
    deadline = time.monotonic() + timeout.total_seconds()
    _resolve(address, min(_NAME_PATIENCE, timeout.total_seconds()))
    if not is_host:
        wait_for_listener(address, port, deadline)
        return connect_to_store(address, port, timeout)
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


def find_master(launch: Launch, timeout: timedelta) -> tuple[dist.Store, str, int]:
    """Open the store: at MASTER_ADDR, else through MPICH's key-value space, or on the only node."""
    one_node = launch.local_world_size == launch.world_size
    if launch.master_addr is not None and launch.master_port is not None:
        address, port = launch.master_addr, launch.master_port
    elif "PMI_FD" in os.environ:  # the launcher has passed its descriptor
        if launch.rank == 0:
            server = host_on("127.0.0.1" if one_node else socket.getfqdn())
            share_over_pmi(f"{server.host}|{server.port}")
            return server, server.host, server.port
        address, _, text = share_over_pmi(None).partition("|")
        port = detection.port(text)
    elif one_node:
        address = "127.0.0.1"
        port = detection.derive_port(*(os.environ.get(name, "") for name in JOB_IDS))
    else:
        raise LaunchError(
            f"{launch.kind} started ranks on several nodes but sets no address to meet at. Set MASTER_ADDR to the "
            "host of rank 0 and MASTER_PORT to a free port there: mpirun -x MASTER_ADDR=node1 -x MASTER_PORT=29400 ..."
        )
    is_host = launch.rank == 0 and not store_outlives_ranks(launch)
    return open_store(address, port, is_host, timeout), address, port


def host_on(host: str) -> dist.TCPStore:
    """Host a store on a free port of `host`'s interface alone, or on all interfaces if only its name is known.

    Before torch 2.8 the store cannot use an existing socket, and listens on all.
    """
    if torch_is_before("2.8"):
        return dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
    listener, (address, port) = sockets.listen(host, sockets.is_loopback(host))
    descriptor = listener.detach()
    return dist.TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)


def connect_to_store(address: str, port: int, timeout: timedelta) -> dist.Store:
    """Connect to the store at this address.

    Raises:
        LaunchError: If the listener there is not a store, or does not answer.
    """
    patience = min(timeout.total_seconds(), _GREETING)
    ports.add(port)
    try:  # torch waits without a time-out for the answer to its greeting
        return call_with_timeout(lambda: dist.TCPStore(address, port, is_master=False, timeout=timeout), patience)
    except (RuntimeError, TimeoutError) as error:
        raise LaunchError(f"The program listening at {address}:{port} is not the store of a job: {error}.") from None


def wait_for_listener(address: str, port: int, deadline: float) -> None:
    """Wait for a listener there; torch's own client would log C++ stacks and wait for twice the time-out."""
    start = time.monotonic()
    news_at = start + _NEWS
    for _ in polls(deadline - start, _KNOCKING):
        left = deadline - time.monotonic()
        try:
            sockets.connect(address, port, max(0.1, min(left, 5.0))).close()
            return
        except OSError as failed:
            error = failed
        if time.monotonic() > news_at:
            log.warning("waiting for rank 0 at %s:%d", printable(address), port)
            news_at = deadline
    waited = time.monotonic() - start
    raise LaunchError(
        f"Nobody answers at MASTER_ADDR:MASTER_PORT {address}:{port} after {waited:.0f} s ({error}). "
        "Is rank 0 running there, and the port open?"
    )


def _resolve(address: str, patience: float) -> None:
    """Wait until a host's name resolves."""
    if not re.fullmatch(r"[\w.:%-]+", address):
        raise LaunchError(f"MASTER_ADDR={address!r} is neither a host name nor an address. Set it to rank 0's host.")
    deadline = time.monotonic() + patience
    while True:
        try:
            socket.getaddrinfo(sockets.encoded(address), None)
            return
        except socket.gaierror as error:
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"MASTER_ADDR={address!r} did not resolve within {patience:g} s: {error}. Is it rank 0's host?"
                ) from None
            log.warning("MASTER_ADDR=%r does not resolve yet (%s); trying again", address, error)
            time.sleep(min(2.0, max(0.0, deadline - time.monotonic())))


def reachable(address: str | None, port: int | None) -> str:
    """Return this host's address for the other ranks: that of its end of a connection to the store."""
    if address is None or port is None:
        return socket.gethostname()
    with sockets.connect(address, port, 10) as connection:
        mine = str(connection.getsockname()[0])
    return address if sockets.is_loopback(mine) else mine
