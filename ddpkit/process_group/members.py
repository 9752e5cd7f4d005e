"""The ranks of a job, as rank 0 describes them to all: short, however many they are and whatever cores they have."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass
from typing import NamedTuple, get_type_hints

from .member import MOST_RANKS, Member
from .store_values import parse, refuse_text


class Run(NamedTuple):
    """Ranks that follow each other on one node.

    Attributes:
        node: The number of the node.
        ranks: How many ranks they are.
        sharers: Number of ranks on the node that may run on the same cores as each of them, itself included.
    """

    node: int
    ranks: int
    sharers: int


@dataclass(frozen=True)
class Members:
    """Where each rank of the job is.

    Attributes:
        token: Secret of this start of the job.
        monitor_address: Where rank 0's monitor listens.
        nodes: The host name of each node.
        runs: All ranks, in order.
    """

    token: str
    monitor_address: tuple[str, int] | None
    nodes: tuple[str, ...]
    runs: tuple[Run, ...]

    @classmethod
    def of(cls, claims: list[Member]) -> Members:
        """Describe the processes that have claimed the ranks, in their order."""
        numbers: dict[tuple[str, ...], int] = {}
        sharers = Counter((claim.node, claim.cores) for claim in claims)
        runs: list[Run] = []
        for claim in claims:
            node = numbers.setdefault(claim.node, len(numbers))
            run = Run(node, 1, sharers[claim.node, claim.cores])
            if runs and runs[-1]._replace(ranks=1) == run:
                run = run._replace(ranks=runs.pop().ranks + 1)
            runs.append(run)
        first = claims[0]
        return cls(first.nonce, first.monitor_address, tuple(node[0] for node in numbers), tuple(runs))

    @classmethod
    def from_json(cls, text: bytes | str, key: str) -> Members:
        """Read the description that stands in the store under this key."""
        fields = parse(text, key, _FORM)
        address = fields["monitor_address"] and tuple(fields["monitor_address"])
        runs = tuple(Run(*run) for run in fields["runs"])
        for node, ranks, _ in runs:
            if ranks < 1 or node not in range(len(fields["nodes"])):
                refuse_text(text, key)
        members = cls(fields["token"], address, tuple(fields["nodes"]), runs)
        if not 0 < members.world_size <= MOST_RANKS:
            refuse_text(text, key)
        return members

    def to_json(self) -> str:
        """Write the description for the store."""
        return json.dumps(asdict(self))

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return sum(run.ranks for run in self.runs)

    def node_of_each(self) -> list[int]:
        """Return the number of each rank's node."""
        return [run.node for run in self.runs for _ in range(run.ranks)]

    def sharers(self, rank: int) -> int:
        """Return how many ranks of its node may run on the same cores as this rank, itself included."""
        end = 0
        for run in self.runs:
            end += run.ranks
            if rank < end:
                return run.sharers
        raise IndexError(rank)


_FORM = get_type_hints(Members) | {"runs": [tuple[int, int, int]]}  # the form of its JSON
