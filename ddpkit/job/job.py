"""The job that this process has joined, with everything that `teardown()` must end."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from ..arguments import as_integer, check_timeout
from ..launch import ranks
from ..launch.launch import Launch
from ..launch.process_tree import Lost
from ..torch_internals import no_group

if TYPE_CHECKING:
    from ..rendezvous.session import Session


# The checked arguments of `setup()`.

_CPU = torch.device("cpu")
ChooseDevice = Callable[[int], str | torch.device]  # called with the local rank
_PLACE = ("rank", "world_size", "local_rank", "local_world_size", "node_rank", "num_nodes", "master_port")


@dataclass
class Options:
    """The arguments of `setup()`, checked and converted; `device` is a torch.device, a function or None.

    Raises:
        TypeError: If the time-out is a number.
        ValueError: If an argument is invalid.
    """

    backend: str | None = None
    device: Any = None
    timeout: timedelta = timedelta(minutes=10)
    num_threads: int | None = None
    watch: bool = True
    launch: Launch | None = None

    def __post_init__(self) -> None:
        """Check the arguments other than the launch, whose ranks are told of a bad one."""
        check_timeout(self.timeout)
        if not isinstance(self.watch, bool):
            raise ValueError(f"watch must be True or False, got {self.watch!r}.")
        self.backend = checked_backend(self.backend)
        if self.num_threads is not None:
            self.num_threads = as_integer(self.num_threads, "num_threads")
        if not callable(self.device):
            self.device = checked_device(self.device)


class OpenStore(NamedTuple):
    """The store where the ranks meet, its address if known, and the rank that hosts it, if any."""

    store: dist.Store
    address: str | None = None
    port: int | None = None
    host: int | None = 0

    @property
    def master(self) -> str | None:
        """Return its address as "host:port", None if unknown."""
        return f"{self.address}:{self.port}" if self.address else None


def check_launch(launch: Any) -> None:
    """Raise for a launch that is not a place in a job."""
    if launch is None:
        return
    if not isinstance(launch, Launch):
        raise TypeError(f"launch must be a ddpkit.Launch, got {type(launch).__name__}.")
    for name in _PLACE:
        number = getattr(launch, name)
        if number is not None and (type(number) is not int or number < 0):
            raise ValueError(f"{name} must be an integer of at least 0, got {number!r}.")
    if launch.rank is None or launch.world_size is None or launch.rank >= launch.world_size:
        found = f"rank is {launch.rank} and world_size is {launch.world_size}"
        raise ValueError(f"rank must be in [0, world_size), but {found}.")
    has_address = launch.master_addr is not None and launch.master_port is not None
    if launch.kind in ("platform", "single") and launch.world_size > 1 and not has_address:
        raise ValueError(
            f"A launch of {launch.world_size} processes needs master_addr and master_port, where the ranks meet, got "
            f"{launch.master_addr!r} and {launch.master_port!r}."
        )


def checked_backend(backend: Any) -> str | None:
    """Convert a backend's name; raise ValueError if torch does not know it."""
    if backend is None:
        return None
    if not isinstance(backend, str):
        raise ValueError(f"backend must be a name such as 'gloo', got {backend!r}.")
    asked = backend.lower()
    known = [name for name in dist.Backend.backend_list if name not in ("undefined", "fake")]
    if not {part.rpartition(":")[2] for part in asked.split(",")}.issubset(known):  # "cpu:gloo,cuda:nccl"
        names = ", ".join(known)
        raise ValueError(f"backend={backend!r} is unknown to torch here: pass one of {names}, or cpu:gloo,cuda:nccl.")
    return asked


def checked_device(device: Any) -> torch.device | None:
    """Convert a device or its name; raise ValueError if torch does not know it."""
    if device is None:
        return None
    if not isinstance(device, (str, torch.device)):
        raise ValueError(
            f"device must be a torch.device, a name such as 'cuda:0', or a function of the local rank that returns "
            f"one, got {device!r}."
        )
    try:
        return torch.device(device)
    except RuntimeError as error:  # torch lists its device types
        raise ValueError(f"device={device!r} is not a device: {error}") from None


# The ranks that take part in a call, if they are not all ranks of the job.


@dataclass(frozen=True)
class Peers:
    """The ranks of a group.

    Attributes:
        ranks: Their ranks in the job, in the order of the group.
        group: torch's process group.
    """

    ranks: tuple[int, ...]
    group: dist.ProcessGroup


def ranks_of(peers: Peers | None) -> Sequence[int]:
    """Return the participants' ranks in the job; None means all, and 0 alone on one process."""
    return range(ranks.get_world_size()) if peers is None else peers.ranks


def group_of(peers: Peers | None) -> dist.ProcessGroup | None:
    """Return the process group as torch takes it: None is the job's."""
    return None if peers is None else peers.group


def subset_of(peers: Peers | None) -> tuple[int, ...] | None:
    """Return the ranks as waits on the store take them: None is all."""
    return None if peers is None else peers.ranks


log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Context:
    """This process's place in the job, as `setup()` determined it; prints as a block for the log.

    Attributes:
        rank: This process's number in the job, from 0.
        world_size: Number of processes in the job.
        local_rank: This process's number on its node, from 0.
        local_world_size: Number of the job's processes on this node.
        node_rank: This node's number in the job, from 0.
        num_nodes: Number of nodes in the job.
        device: This rank's device.
        backend: Backend of the process group, as torch names it; None without a group.
        launcher: How this process was started: the `kind` of its `Launch`.
        master: Where the ranks met, as "host:port"; None on one process, or in an adopted group.

    Example:
        >>> from ddpkit import distributed
        >>> with distributed(device="cpu") as context:
        ...     print(context)
          launcher: single
           backend: none (one process)
        world size: 1 on 1 node
              rank: 0
        local rank: 0 of 1 on node 0
            device: cpu
            master: none
    """

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
        nodes = "1 node" if self.num_nodes == 1 else f"{self.num_nodes} nodes"
        rows = {
            "launcher": self.launcher,
            "backend": self.backend or "none (one process)",
            "world size": f"{self.world_size} on {nodes}",
            "rank": self.rank,
            "local rank": f"{self.local_rank} of {self.local_world_size} on node {self.node_rank}",
            "device": self.device,
            "master": self.master or "none",
        }
        return "\n".join(f"{name:>10}: {value}" for name, value in rows.items())


def context_of(launch: Launch, device: torch.device, backend: str | None = None, master: str | None = None) -> Context:
    """Make the context of a launch; unknown places are those of a job on one node."""
    place = launch.rank, launch.world_size, launch.local_rank or 0, launch.local_world_size or 1
    node = launch.node_rank or 0, launch.num_nodes or 1
    return Context(*place, *node, device, backend, launch.kind, master)


@dataclass
class Job:
    """A job, from `setup()` to `teardown()`.

    Attributes:
        launch: How this process was started; complete once the ranks have met.
        asked: The arguments of `setup()`.
        context: This process's place in it.
        peer_lost: Returns the fate of a process that must outlive this one, "" while it lives.
        group: Returns its process group, as long as that exists; None on one process.
        session: Where its ranks meet; None on one process.
        watch: The `WatchThread` that reports failures; imported only if requested.
        control: The device of small control messages.
        owns_group: Whether `setup()` created the group.
        hosts_store: Whether this process hosts the store.
        first_hook: The exception hook from before `setup()`.
        former_hook: The hook that torch installed when it created the group.
        former_error: Identity of the exception that had ended something in this interpreter before.
        finalizer: Runs at the end of a multiprocessing child.
        data_parallel: The data-parallel ranks, this one included; None for all.
        caller: The thread that calls its collectives, from the first one on.
        refused: Whether another thread called one, so that this rank has failed.
        threads: CPU operator threads before `setup()`, and as set by it; None if it set none.
        unfinished: What all ranks must wait for before they leave normally, by its owner.
    """

    launch: Launch
    asked: Options
    context: Context
    peer_lost: Lost = str
    group: Callable[[], Any] = no_group
    session: Session | None = None
    watch: Any = None
    control: torch.device = _CPU
    owns_group: bool = False
    hosts_store: bool = False
    first_hook: Any = None
    former_hook: Any = None
    former_error: int = 0
    finalizer: Any = None
    data_parallel: Peers | None = None
    caller: threading.Thread | None = None
    refused: bool = False
    threads: tuple[int, int] | None = None
    unfinished: dict[object, Callable[[], None]] = field(default_factory=dict)

    def is_current(self) -> bool:
        """Return whether its group is the current one; always true on one process."""
        group = dist.group.WORLD  # `current_group()`; it is asked in each collective
        return self.session is None if group is None else self.group() is group

    def set_threads(self, sharers: int, cores: int) -> None:
        """Divide the cores among the ranks that share them, unless the user or the launcher has set the threads."""
        asked = self.asked.num_threads
        if asked is None:
            if sharers == 1 or os.environ.get("OMP_NUM_THREADS") or os.environ.get("MKL_NUM_THREADS"):
                return
            asked = max(1, cores // sharers)
            log.info("using %d CPU threads per rank: %d ranks share %d cores", asked, sharers, cores)
        self.threads = torch.get_num_threads(), asked
        torch.set_num_threads(asked)

    def undo_changes(self) -> None:
        """Restore what this job changed in torch, unless the script changed it again."""
        is_rank = self.session is None or self.session.is_own  # a forked child has no threads to divide
        if is_rank and self.threads is not None and torch.get_num_threads() == self.threads[1]:
            torch.set_num_threads(self.threads[0])

    def own_session(self) -> Session | None:
        """Return its session; None on one process and in a child forked from a rank."""
        return self.session if self.session is not None and self.session.is_own else None
