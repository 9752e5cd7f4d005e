"""The claim of a process to be one of the job's ranks, and what it tells others."""

from __future__ import annotations

import functools
import json
import os
import socket
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any, get_type_hints

from ..launch.process_tree import ancestors, boot_id, own_birth, runs_since
from ..parsing import parse, refuse_text

MOST_RANKS = 1 << 20  # most ranks that the store may report: more come from another program


def _machine() -> tuple[str, ...]:
    """Return this machine's boot, the process's network and pid namespaces; () where the system does not show them."""
    try:
        return boot_id(), os.readlink("/proc/self/ns/net"), os.readlink("/proc/self/ns/pid")
    except OSError:
        return ()


def usable_cores() -> tuple[int, ...]:
    """Return the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


_form_of = functools.cache(get_type_hints)  # of a dataclass in JSON


def _fields_of(kind: type, text: bytes | str, key: str) -> dict[str, Any]:
    """Parse the fields of a dataclass, stored under this key; lists become tuples."""
    fields = parse(text, key, _form_of(kind))
    return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}


@dataclass(frozen=True)
class Member:
    """A rank of the job: the process that claims it, its location, and its view of the job.

    Attributes:
        rank: The claimed rank.
        world_size: Number of ranks in the job, by its environment.
        run_id: Identity of the run, if its environment names one.
        store_outlives_ranks: Whether torchrun or spawn hosts the store, which then survives a restart of the ranks.
        watch: Whether it has a watch.
        watch_address: Where rank 0's watch listens.
        host: Name of its machine.
        machine: Identity of the machine and of its network and pid namespaces.
        pid: Process id.
        born: Start time of the process; pids are reused.
        cores: Cores that it may use, as bits, in hexadecimal digits.
        nonce: Secret of this claim.
    """

    rank: int
    world_size: int
    run_id: str | None
    store_outlives_ranks: bool
    watch: bool = True
    watch_address: tuple[str, int] | None = None
    host: str = field(default_factory=socket.gethostname)
    machine: tuple[str, ...] = field(default_factory=_machine)
    pid: int = field(default_factory=os.getpid)
    born: str = field(default_factory=own_birth)
    cores: str = field(default_factory=lambda: f"{sum(1 << core for core in usable_cores()):x}")
    nonce: str = field(default_factory=lambda: os.urandom(8).hex())

    def __str__(self) -> str:
        return f"{self.host} (pid {self.pid})"

    @classmethod
    def from_json(cls, text: bytes | str, rank: int) -> Member:
        """Parse this rank's claim from the store."""
        key = claim_key(rank)
        member = cls(**_fields_of(cls, text, key))
        if member.rank != rank or rank not in range(min(member.world_size, MOST_RANKS)):
            refuse_text(text, key)
        return member

    def to_json(self) -> str:
        """Serialise the claim for the store."""
        return json.dumps(asdict(self))

    @property
    def node(self) -> tuple[str, ...]:
        """Return an identity shared by the ranks of one node only: cloned machines share a host name."""
        return self.host, *self.machine[:2]

    def is_alive(self) -> bool | None:
        """Return whether the process still runs; None where that cannot be read from here."""
        return runs_since(self.pid, self.born) if self._is_here() and self.born else None

    def is_ancestor(self) -> bool:
        """Return whether this process descends from it."""
        return self._is_here() and ancestors().get(self.pid) == self.born

    def _is_here(self) -> bool:
        return (self.host, self.machine) == (socket.gethostname(), _machine())


def claim_key(rank: int) -> str:
    """Return the key of the claim to a rank."""
    return f"claim/{rank}"


@dataclass(frozen=True)
class Members:
    """The location of each rank of the job, published by rank 0.

    Attributes:
        token: Secret of this start of the job.
        watch_address: Where rank 0's watch listens.
        nodes: Host name of each node.
        node_of: Node number of each rank.
        sharers: Number of ranks on the node that may use the same cores as each rank, itself included.
    """

    token: str
    watch_address: tuple[str, int] | None
    nodes: tuple[str, ...]
    node_of: tuple[int, ...]
    sharers: tuple[int, ...]

    @classmethod
    def of(cls, claims: list[Member]) -> Members:
        """Describe the processes that claimed the ranks, in rank order."""
        numbers: dict[tuple[str, ...], int] = {}
        node_of = tuple(numbers.setdefault(claim.node, len(numbers)) for claim in claims)
        on_cores = Counter((claim.node, claim.cores) for claim in claims)
        sharers = tuple(on_cores[claim.node, claim.cores] for claim in claims)
        nodes = tuple(node[0] for node in numbers)
        return cls(claims[0].nonce, claims[0].watch_address, nodes, node_of, sharers)

    @classmethod
    def from_json(cls, text: bytes | str) -> Members:
        """Parse the description from the store."""
        members = cls(**_fields_of(cls, text, "members"))
        numbers = range(len(members.nodes))
        if not all(node in numbers for node in members.node_of) or len(members.sharers) != members.world_size:
            refuse_text(text, "members")
        return members

    def to_json(self) -> str:
        """Serialise the description for the store."""
        return json.dumps(asdict(self))

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return len(self.node_of)

    @property
    def hosts(self) -> list[str]:
        """Return each rank's host name."""
        return [self.nodes[node] for node in self.node_of]
