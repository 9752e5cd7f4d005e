"""Follow the ranks of a checked script until they have shown enough, and hold what they have told."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from ..cli import announce
from ..ranks import Rank, Ranks
from ..recorder import Record
from .source import Place

RULES: dict[str, dict[str, str]] = json.loads(Path(__file__).with_name("rules.json").read_text())
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
    def is_distributed(self) -> bool:
        """Return whether the ranks belong together: without a process group, each is a training of its own."""
        return bool(self.parted) or any(record["joined"] for record in self.all("step"))

    @property
    def who(self) -> str:
        """Name the ranks in a sentence."""
        return say_ranks(self.ranks)

    @property
    def steps(self) -> list[list[Record]]:
        """List the optimiser steps that all ranks have made, as a record of each rank."""
        return [records for _, records in self.rows("step", "optimizer", "number")]

    @property
    def training(self) -> set[str]:
        """Name the loaders from which a rank trains."""
        return {record["loader"] for record in self.all("trains")}

    @property
    def deals_micro_batches(self) -> bool:
        """Return whether ranks take different numbers of micro-batches, whose gradients `exact_gradients` adds up."""
        return any(record.get("sampler") == "MicroBatchSampler" for record in self.all("epoch"))

    def finding(self, rule: str, evidence: str, *lines: Sequence[Any] | None, **changes: Any) -> Finding:
        """Make a finding by a rule of the table, of all ranks, at the nearest of some lines or stacks.

        Args:
            rule: Its name in `rules.json`.
            evidence: What was seen.
            lines: The first is where the bug is, the others belong to it.
            changes: Other `severity` or `ranks`.
        """
        found = places(*lines)
        entry = RULES[rule]
        why = entry["why"].replace("{ranks}", str(self.world_size))
        where = found[0] if found else None
        kind, severity, fix = entry["finding"], entry["severity"], entry["fix"]
        return replace(Finding(kind, severity, where, self.ranks, evidence, why, fix, found[1:]), **changes)

    def of(self, kind: str) -> dict[int, list[Record]]:
        """Select the records of one kind, by rank."""
        return {rank: [r for r in self.records[rank] if r["kind"] == kind] for rank in self.ranks}

    def all(self, kind: str) -> list[Record]:
        """List the records of one kind, of all ranks."""
        return list(chain.from_iterable(self.of(kind).values()))

    def first(self, kind: str) -> list[Record]:
        """List the records of one kind, of the first rank."""
        return [record for record in self.records[self.ranks[0]] if record["kind"] == kind]

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
        if kind == "step" and self.all("join"):  # then ranks make other numbers of steps
            rows = [row for row in rows if agree(row[1], "position")]
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


def agree(records: Sequence[Record], key: str) -> bool:
    """Return whether a field is equal in all records."""
    return all_equal([record[key] for record in records])


def name_some(names: Sequence[str]) -> str:
    """Name the first of some things, and tell how many more there are."""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"`{names[0]}`{more}"


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
    ["gradients-not-averaged", "replicas-differ-at-start", "replicas-drift", "same-samples", "same-random-numbers"]
)


def hold_parts(facts: Facts) -> bool:
    """Return whether the network is spread over the ranks in stages: tensors go from rank to rank in training."""
    if any(record["causes"] for record in facts.all("step")):  # a DDP, of replicas
        return False
    sending = [records for records in facts.of("point to point").values() if any(r["step"] for r in records)]
    return len(sending) > 1


# Compare the order in which ranks enter collectives, as they tell it.

_OF_ONE_SIZE = ("all_reduce", "broadcast", "reduce", "all_gather_into_tensor", "reduce_scatter_tensor")


class Order:
    """Holds the collectives of each group, and finds the first that ranks do not enter alike.

    Attributes:
        parted: That collective, once it is found.
    """

    def __init__(self, ranks: list[int]) -> None:
        self._ranks = ranks
        self._entered: dict[tuple[str, int], list[Record]] = {}
        self._ended: dict[int, str] = {}
        self._failed: set[int] = set()
        self._stepping: set[int] = set()
        self._has_join = False
        self.parted: Parting | None = None

    def take(self, rank: int, record: Record) -> None:
        """Take in what a rank tells."""
        if record["kind"] == "join" or self._has_join:  # ranks that have ended shadow the others' collectives
            self._has_join = True
        elif record["kind"] == "step":
            self._stepping.add(rank)
        elif record["kind"] == "collective":
            self._compare(rank, record)
            self._compare_ends()
        elif record["kind"] in ("done", "end"):
            if record.get("error") or record.get("code"):  # it has failed, of which the others know nothing
                self._failed.add(rank)
            elif rank not in self._failed:
                self._ended.setdefault(rank, record.get("reason") or SCRIPT_END)
            self._compare_ends()

    def _compare(self, rank: int, record: Record) -> None:
        entered = self._entered.setdefault((record["group"], rank), [])
        for other in self._ranks:
            theirs = self._entered.get((record["group"], other), [])[len(entered) :]
            if other != rank and theirs and _signature(theirs[0]) != _signature(record):
                self._part(rank, other, record, theirs[0], "")
        entered.append(record)

    def _compare_ends(self) -> None:
        """Find a rank that has entered a collective which one that has ended never will."""
        for ended, reason in self._ended.items():
            count = len(self._entered.get(("0", ended), []))
            others = self._stepping if reason == "steps" else self._ranks  # it was stopped here, others help it
            for rank in others:
                theirs = self._entered.get(("0", rank), [])
                if len(theirs) > count:
                    self._part(rank, ended, theirs[count], None, reason)

    def _part(self, rank: int, other: int, record: Record, theirs: Record | None, ends: str) -> None:
        if self.parted is None:
            self.parted = Parting((rank, other), (record, theirs), ends)


def _signature(record: Record) -> tuple[object, ...]:
    if record["op"] not in _OF_ONE_SIZE:
        return (record["op"],)
    return record["op"], record.get("dtype"), tuple(record.get("shape", ())), record.get("reduction")


_NO_GPU = "_cuda_|compiled with CUDA|No CUDA GPUs|no NVIDIA driver|a CUDA device|no accelerator|none is available"
_POLL = 0.1  # seconds
_NEWS = 10.0  # seconds between two lines on stderr
_AFTER_PARTING = 1.0  # seconds in which the ranks may say more, once they have parted
_AFTER_FAILURE = 5.0  # seconds in which other ranks may report, once one has failed
_AFTER_END = 20.0  # seconds in which other ranks may tell nothing, once one has ended


@dataclass
class Outcome:
    """How a run went.

    Attributes:
        facts: What the ranks have told.
        steps: The optimiser steps that every rank has made which makes any.
        trouble: Why the script could not be checked as far as it should, "" if it could.
        details: The end of the script's output, or the stacks of ranks that hang.
        seconds: How long it took.
        unobserved: The observers that have failed, with the error of each.
    """

    facts: Facts
    steps: int
    trouble: str
    details: list[str]
    seconds: float
    unobserved: dict[str, str]


class Watch:
    """Follows the ranks.

    Args:
        ranks: The ranks, started.
        timeout: Bound on the time in which no rank tells anything, in seconds.
        most: How many optimizer steps a rank makes at most.
    """

    def __init__(self, ranks: Ranks, timeout: float, most: int) -> None:
        self._ranks = ranks
        self._most = most
        self._timeout = timeout
        self._order = Order([rank.number for rank in ranks.all])
        self._finished: dict[int, Record] = {}

    def run(self) -> Outcome:
        """Wait until all ranks have finished, or one of the bounds is reached."""
        begun = time.monotonic()
        deadline = begun + self._timeout
        last = begun + 1e9
        announced = begun
        hanging = False
        while not hanging and len(self._finished) < len(self._ranks.all):
            heard = False
            for rank, record in self._ranks.wait(_POLL):
                heard = True
                self._order.take(rank.number, record)
                if record["kind"] in ("done", "end", "spawns"):
                    self._finished.setdefault(rank.number, record)
            now = time.monotonic()
            if heard:
                deadline = now + self._patience()
            for rank in self._ranks.all:
                if rank.ended is not None:
                    self._finished.setdefault(rank.number, {"kind": "died", "how": rank.ended})
            if self._order.parted:
                last = min(last, now + _AFTER_PARTING)
            if any(_has_failed(record) for record in self._finished.values()):
                last = min(last, now + _AFTER_FAILURE)
            if now > announced + _NEWS:
                announced = now
                self._announce(now - begun)
            hanging = now > min(deadline, last)
        return self._outcome(hanging, time.monotonic() - begun)

    def _announce(self, seconds: float) -> None:
        made = min(map(_steps, self._ranks.all))
        announce(f"ddpkit check: {seconds:.0f} s, optimizer step {made} of at most {self._most}")

    def _patience(self) -> float:
        """Bound the time in which no rank tells anything."""
        if self._waits_for_helpers():
            return min(self._timeout, _AFTER_FAILURE)
        if any(record["kind"] == "end" for record in self._finished.values()):
            return min(self._timeout, _AFTER_END)
        return self._timeout

    def _waits_for_helpers(self) -> bool:
        """Return whether all ranks that make steps have made enough, and others help them which make none."""
        running = [rank for rank in self._ranks.all if rank.number not in self._finished]
        are_done = [record.get("reason") == "steps" for record in self._finished.values()]
        return any(are_done) and all(are_done) and not any(map(_steps, running))

    def _outcome(self, hanging: bool, seconds: float) -> Outcome:
        facts = Facts({rank.number: rank.records for rank in self._ranks.all}, self._order.parted)
        made = [_steps(rank) for rank in self._ranks.all]
        steps = min(filter(None, made), default=0)
        trouble, details = self._describe_trouble(hanging, steps)
        failed = {record["name"]: record["error"] for record in facts.all("observer failed")}
        return Outcome(facts, steps, trouble, details, seconds, failed)

    def _describe_trouble(self, hanging: bool, steps: int) -> tuple[str, list[str]]:
        for number, record in self._finished.items():
            if record["kind"] == "spawns":
                return "the script starts processes of its own: check the function that they run, as one rank", []
            if _has_failed(record):
                how = record.get("how") or f"exited with code {record['code']}"
                error = ""
                if record.get("error"):
                    how, error = "failed", f"{_say_where(record)}: {record['error']}"
                trouble = f"rank {number} {how} after {steps} optimizer steps{error}"
                if re.search(_NO_GPU, error):
                    trouble += ". The script needs a GPU: set it to the CPU, or check it with `--device cuda`"
                return trouble, self._ranks.all[number].tail()
        if hanging and not self._order.parted and not self._waits_for_helpers():
            return self._describe_hanging()
        if not steps:
            return "the script ended without a step of a torch optimizer", self._ranks.all[0].tail()
        return "", []

    def _describe_hanging(self) -> tuple[str, list[str]]:
        """Tell which ranks go on, and at which lines."""
        running = [rank for rank in self._ranks.all if rank.number not in self._finished]
        stacks = []
        for rank in running:
            stacks += [f"rank {rank.number}:", *rank.read_stack().splitlines()[1:7]]
        if not self._finished:
            return f"no rank made progress for {self._timeout:g} s", stacks
        ended = say_ranks(sorted(self._finished))
        return f"{say_ranks([rank.number for rank in running])} did not end after {ended} had ended", stacks


def _say_where(record: Record) -> str:
    return f" at {place(record['where'])}" if record["where"] else ""


def _has_failed(record: Record) -> bool:
    if record["kind"] == "end":
        return bool(record["error"] or record["code"])
    return bool(record["kind"] != "done")


def _steps(rank: Rank) -> int:
    return sum(1 for record in rank.records if record["kind"] == "step" and record["optimizer"] == 0)
