"""Hold what all ranks have recorded, and what was concluded from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from ...recorder import Record
from ..source import Place

SEVERITIES = ("wrong", "suspicious")
SCRIPT_END = "the end of the script"  # where a rank has come that has ended without an error


@dataclass
class Finding:
    """A bug of the script.

    Attributes:
        kind: The name of the bug.
        severity: One of `SEVERITIES`.
        where: The line of the script to change.
        ranks: The ranks that show it.
        evidence: What was seen, in numbers.
        why: Why it matters.
        fix: The remedy, in a line of code.
        also: More lines that belong to it.
    """

    kind: str
    severity: str
    where: Place | None
    ranks: list[int]
    evidence: str
    why: str
    fix: str
    also: list[Place]


@dataclass
class Facts:
    """What was seen of a run.

    Attributes:
        records: What each rank has told, by its number.
        parted: Where the ranks' collectives parted, if they did.
    """

    records: dict[int, list[Record]]
    parted: Parting | None = None

    @property
    def ranks(self) -> list[int]:
        """List the ranks."""
        return sorted(self.records)

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return len(self.records)

    @property
    def training(self) -> set[str]:
        """Name the loaders from which a rank trains."""
        return {record["loader"] for records in self.of("trains").values() for record in records}

    @property
    def deals_micro_batches(self) -> bool:
        """Return whether ranks take different numbers of micro-batches, whose gradients `exact_gradients` adds up."""
        epochs = chain.from_iterable(self.of("epoch").values())
        return any(record.get("sampler") == "MicroBatchSampler" for record in epochs)

    def finding(
        self,
        kind: str,
        evidence: str,
        why: str,
        fix: str,
        *lines: Sequence[Any] | None,
        severity: str = "wrong",
        ranks: list[int] | None = None,
    ) -> Finding:
        """Make a finding at the nearest of some lines or stacks, of all ranks by default; the others belong to it."""
        found = places(*lines)
        where = found[0] if found else None
        return Finding(kind, severity, where, ranks or self.ranks, evidence, why, fix, found[1:])

    def of(self, kind: str) -> dict[int, list[Record]]:
        """Select the records of one kind, by rank."""
        return {rank: [r for r in self.records[rank] if r["kind"] == kind] for rank in self.ranks}

    def rows(self, kind: str, *keys: str) -> list[tuple[tuple[Any, ...], list[Record]]]:
        """Put records of the ranks side by side, by the values of some fields.

        Returns:
            For each combination of values that every rank has told: these, and a record of each rank.
        """
        by_rank = []
        for records in self.of(kind).values():
            by_rank.append({tuple(record[key] for key in keys): record for record in records})
        first, *others = by_rank
        common = [values for values in first if all(values in other for other in others)]
        rows = [(values, [table[values] for table in by_rank]) for values in common]
        if kind == "step" and any(self.of("join").values()):  # then ranks make other numbers of steps
            rows = [row for row in rows if all_equal([record["position"] for record in row[1]])]
        return rows


@dataclass
class Parting:
    """The first collective that ranks did not enter alike.

    Attributes:
        ranks: Two ranks.
        entered: The collective that each entered, None for one that has ended or waits elsewhere.
        ends: How a rank ended, "" while it runs.
    """

    ranks: tuple[int, int]
    entered: tuple[Record | None, Record | None]
    ends: str = ""


def place(places: Sequence[Any]) -> Place | None:
    """Return the nearest line of a recorded stack."""
    return Place(*places[0]) if places else None


def places(*stacks: Sequence[Any] | None) -> list[Place]:
    """List the lines of recorded stacks, and single lines, each once."""
    found: list[Place] = []
    for stack in stacks:
        if isinstance(stack, Place):
            found.append(stack)
        else:
            found += [Place(*entry) for entry in stack or []]
    return list(dict.fromkeys(found))


def in_function_of(stack: Sequence[Any], other: Sequence[Any]) -> Place | None:
    """Return the line of a stack that is in the function where another begins; else its nearest."""
    target = place(other)
    lines = places(stack)
    same = [line for line in lines if target and (line.file, line.function) == (target.file, target.function)]
    return next(iter([*same, *lines]), None)


def all_equal(values: Sequence[Any]) -> bool:
    """Return whether all values are equal."""
    return all(value == values[0] for value in values)


def say_ranks(ranks: list[int]) -> str:
    """Name ranks.

    >>> say_ranks([0, 1, 2])
    'ranks 0, 1 and 2'
    """
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return "ranks " + ", ".join(map(str, ranks[:-1])) + f" and {ranks[-1]}"


# Tell ranks that hold parts of one network from ranks that hold replicas of it.

OF_REPLICAS = frozenset(
    [
        "gradients-not-averaged",
        "replicas-differ-at-start",
        "replicas-drift",
        "same-samples",
        "same-random-numbers",
    ]
)


def hold_parts(facts: Facts) -> bool:
    """Return whether the network is spread over the ranks in stages: tensors go from rank to rank in training."""
    if any(record["causes"] for record in chain.from_iterable(facts.of("step").values())):  # a DDP, of replicas
        return False
    sending = [records for records in facts.of("point to point").values() if any(r["step"] for r in records)]
    return len(sending) > 1
