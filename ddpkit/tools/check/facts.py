"""Hold what the ranks have told, make findings of it, and follow the ranks until they have told enough."""

from __future__ import annotations

import json
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from ..cli import announce
from ..ranks import Rank, Ranks
from ..recorder import Record
from . import observed
from .observed import Collective, End, Epoch, EpochEnd, Join, Optimized, Sent, Step
from .source import Place, Stack

_TABLE = Path(__file__).with_name("rules.json")
_RULES: dict[str, dict[str, str]] = json.loads(_TABLE.read_text())
KINDS = sorted({rule["finding"] for rule in _RULES.values()})
_HEADER = 18  # elements before the gradients in a message of `average_gradients`
SCRIPT_END = "the end of the script"  # where a rank has come that has ended without an error
Lines = Place | Sequence[Place] | None
_Seen = TypeVar("_Seen")
_Told = TypeVar("_Told")


@dataclass
class Finding:
    """A bug of the script.

    Attributes:
        kind: The name of the bug.
        severity: "wrong" or "suspicious".
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


class Facts:
    """What was seen of a run.

    Args:
        records: What each rank has told, by its number.
        parted: Where the ranks' collectives parted, if they did.

    Attributes:
        told: What each rank has told, as instances of the classes of `observed`.
        ranks: The numbers of the ranks.
        who: The ranks in a sentence.
        is_distributed: Whether the ranks belong together: without a process group, each is a training of its own.
        training: The keys of the loaders from which a rank trains.
        steps: The optimizer steps that all ranks have made, as a record of each rank.
        epochs: Those that all ranks have begun, in the same way.
        collectives: Those that all ranks have entered.
        are_replicas: Whether anything says that the ranks hold replicas of one network.
        are_stages: Whether they hold its stages: tensors go from rank to rank in training, and there is no DDP.
        deals_micro_batches: Whether ranks take different numbers of them, whose gradients `exact_gradients` adds up.
    """

    def __init__(self, records: dict[int, list[Record]], parted: Parting | None = None) -> None:
        self.told = {rank: _read(records[rank]) for rank in sorted(records)}
        self.parted = parted
        self.ranks = list(self.told)
        self.world_size = len(self.ranks)
        self.who = say_ranks(self.ranks)
        self.is_distributed = bool(parted) or any(step.joined for step in self.all(Step))
        self.training = {seen.loader for seen in self.all(observed.Trains)}
        self.steps = self.rows(Step, "optimizer", "number")
        if self.all(Join):  # then ranks make different numbers of steps
            self.steps = [row for row in self.steps if agree(row, "position")]
        self.epochs = self.rows(Epoch, "loader", "number")
        self.collectives = self.rows(Collective, "position", "group")
        has_ddp = any(step.wrappers for step in self.all(Step))
        has_ddp |= any(seen.op.endswith("of DDP") for seen in self.all(Collective))
        sending = [any(each.step for each in sent) for sent in self.of(Sent).values()]
        self.are_stages = sum(sending) > 1 and not has_ddp
        self.are_replicas = has_ddp or (not self.are_stages and self._are_averaged())
        self.deals_micro_batches = any(epoch.sampler == "MicroBatchSampler" for epoch in self.all(Epoch))

    def _are_averaged(self) -> bool:
        """Return whether weights or gradients are combined or sent, or a sampler deals the samples of an epoch."""
        if any(epoch.has_epoch for epoch in self.all(Epoch)) or any(step.summed for step in self.all(Step)):
            return True
        sent = {math.prod(seen.shape) for seen in self.all(Collective)}
        for told in self.first(Optimized):
            shapes = [parameter.shape for parameter in told.parameters.values()]
            sizes = [math.prod(shape or ()) for shape in shapes]
            total = sum(sizes)
            of_network = {max(sizes, default=0), total, total + _HEADER} - {1}
            if None in shapes or sent & of_network:
                return True
        return any(seen.trained for seen in self.all(Collective))

    def of(self, kind: type[_Seen]) -> dict[int, list[_Seen]]:
        """Select the records of one kind, by rank."""
        return {rank: [seen for seen in told if isinstance(seen, kind)] for rank, told in self.told.items()}

    def all(self, kind: type[_Seen]) -> list[_Seen]:
        """List the records of one kind, of all ranks."""
        return list(chain.from_iterable(self.of(kind).values()))

    def first(self, kind: type[_Seen]) -> list[_Seen]:
        """List the records of one kind, of the first rank."""
        return self.of(kind)[self.ranks[0]]

    def rows(self, kind: type[_Seen], *fields: str) -> list[list[_Seen]]:
        """Put records of the ranks side by side that have equal fields; leave out what not all ranks have told."""
        by_rank = [by_fields(told, *fields) for told in self.of(kind).values()]
        keys = [key for key in by_rank[0] if all(key in table for table in by_rank)]
        return [[table[key][-1] for table in by_rank] for key in keys]

    def finding(
        self, rule: str, evidence: str, *lines: Lines, severity: str = "", ranks: Sequence[int] = ()
    ) -> Finding:
        """Make a finding by a rule of the table.

        Args:
            rule: Its name in `rules.json`.
            evidence: What was seen.
            lines: Lines and stacks: the first line is where the bug is, the others belong to it.
            severity: Another one than the rule's.
            ranks: Those that show it, instead of all.
        """
        found = listed(*lines)
        entry = _RULES[rule]
        return Finding(
            kind=entry["finding"],
            severity=severity or entry["severity"],
            where=found[0] if found else None,
            ranks=list(ranks) or self.ranks,
            evidence=evidence,
            why=entry["why"].replace("{ranks}", str(self.world_size)),
            fix=entry["fix"],
            also=found[1:],
        )


def _read(records: list[Record]) -> list[Any]:
    """Read what a rank has told, and count its collectives."""
    entered: Counter[str] = Counter()
    told = []
    for seen in map(observed.read, records):
        if isinstance(seen, Collective):
            told.append(seen._replace(position=entered[seen.group]))
            entered[seen.group] += 1
        elif seen is not None:
            told.append(seen)
    return told


Findings = Iterator[Finding]
Rule = Callable[[Facts], Findings]


def first_of(*rules: Rule) -> Rule:
    """Make a rule that ends with the first finding of some rules."""

    def look(facts: Facts) -> Findings:
        return islice(chain.from_iterable(rule(facts) for rule in rules), 1)

    return look


def listed(*lines: Lines) -> Stack:
    """List the lines of stacks, and single lines, each once."""
    found: Stack = []
    for each in lines:
        found += [each] if isinstance(each, Place) else each or []
    return list(dict.fromkeys(found))


def in_function_of(stack: Stack, other: Stack) -> Place | None:
    """Return the line of a stack that is in the function where another begins; else its nearest."""
    same = [line for line in stack for target in other[:1] if line.shares_function_with(target)]
    return next(iter([*same, *stack]), None)


def by_fields(records: Sequence[_Told], *fields: str) -> dict[tuple[Any, ...], list[_Told]]:
    """Put together the records with equal fields."""
    found: dict[tuple[Any, ...], list[_Told]] = {}
    for record in records:
        key = tuple(getattr(record, field) for field in fields)
        found.setdefault(key, []).append(record)
    return found


def all_equal(values: Sequence[Any]) -> bool:
    """Return whether all values are equal."""
    return all(value == values[0] for value in values)


def agree(records: Sequence[Any], field: str) -> bool:
    """Return whether a field is equal in all records."""
    return all_equal([getattr(record, field) for record in records])


def common(records: Sequence[Any], field: str) -> list[str]:
    """List the keys that a dict has in all records."""
    tables = [getattr(record, field) for record in records]
    return [key for key in tables[0] if all(key in table for table in tables)]


def differing(tables: Sequence[dict[str, Any]], keys: Iterable[str]) -> list[str]:
    """List the keys whose values are not equal in all tables."""
    return [key for key in keys if not all_equal([table.get(key) for table in tables])]


def joined(values: Sequence[Any], form: str = "") -> str:
    """Write the ranks' values in a sentence."""
    return " and ".join(format(value, form) for value in values)


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


# Compare the order in which ranks enter collectives, as they tell it.

_OF_ONE_SIZE = ("all_reduce", "broadcast", "reduce", "all_gather_into_tensor", "reduce_scatter_tensor")


class Parting(NamedTuple):
    """The first collective that ranks did not enter alike.

    Attributes:
        ranks: Two ranks.
        entered: The collective that each entered, None for one that has ended or waits elsewhere.
        end: How a rank ended, "" while it runs.
    """

    ranks: tuple[int, int]
    entered: tuple[Collective, Collective | None]
    end: str


class Order:
    """Holds the collectives of each group, and finds the first that ranks do not enter alike.

    Attributes:
        ranks: The numbers of the ranks.
        parted: That collective, once it is found.
        ends: How the ranks have ended that have.
    """

    def __init__(self, ranks: list[int]) -> None:
        self.ranks = ranks
        self._entered: dict[tuple[str, int], list[Collective]] = {}
        self._stepping: set[int] = set()
        self._cuts: Counter[int] = Counter()  # epochs of each rank that were cut
        self._has_join = False
        self.parted: Parting | None = None
        self.ends: dict[int, End] = {}

    def take(self, rank: int, record: Record) -> None:
        """Take in what a rank tells."""
        seen = observed.read(record)
        if isinstance(seen, End):
            self.ends.setdefault(rank, seen)
        elif isinstance(seen, Step):
            self._stepping.add(rank)
        elif isinstance(seen, EpochEnd):
            self._cuts[rank] += seen.cut
        elif isinstance(seen, Join):
            self._has_join = True
        if self._has_join:  # ranks that have ended shadow the others' collectives
            return
        if isinstance(seen, Collective):
            self._compare(rank, seen)
        if isinstance(seen, Collective | End):
            self._compare_ends()

    def _compare(self, rank: int, seen: Collective) -> None:
        own = self._of(rank, seen.group)
        for other in self.ranks:
            theirs = self._of(other, seen.group)[len(own) :]
            if theirs and _signature(theirs[0]) != _signature(seen) and self.are_cut_alike(rank, other):
                self.parted = self.parted or Parting((rank, other), (seen, theirs[0]), "")
        own.append(seen)

    def are_cut_alike(self, *ranks: int) -> bool:
        """Return whether ranks have had equally many epochs cut, or should: few are where no step is made."""
        return self._stepping.issuperset(ranks) or all_equal([self._cuts[rank] for rank in ranks])

    def _of(self, rank: int, group: str = "0") -> list[Collective]:
        """Return the collectives of a group that a rank has entered."""
        return self._entered.setdefault((group, rank), [])

    def _compare_ends(self) -> None:
        """Find a rank that has entered a collective which one that has ended never will."""
        for ended, end in self.ends.items():
            if end.has_failed:  # of which the others know nothing
                continue
            count = len(self._of(ended))
            others = self._stepping if end.reason == "steps" else self.ranks  # it was stopped here, others help it
            for rank in others:
                more = self._of(rank)[count:]
                if more and self.are_cut_alike(rank, ended):
                    reason = end.reason or SCRIPT_END
                    self.parted = self.parted or Parting((rank, ended), (more[0], None), reason)


def _signature(seen: Collective) -> tuple[object, ...]:
    if seen.op not in _OF_ONE_SIZE:
        return (seen.op,)
    return seen.op, seen.dtype, seen.shape, seen.reduction


# Follow the ranks.

_NO_GPU = "(?i)cuda|gpu|nvidia|accelerator"  # in an exception that a script raises before its first step
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
    """Follows the ranks, started, while they tell something within `timeout` seconds, for at most `most` steps."""

    def __init__(self, ranks: Ranks, timeout: float, most: int) -> None:
        self._ranks = ranks
        self._most = most
        self._timeout = timeout
        self._order = Order([rank.number for rank in ranks.all])
        self._ends = self._order.ends

    def run(self) -> Outcome:
        """Wait until all ranks have finished, or one of the bounds is reached."""
        begun = time.monotonic()
        deadline = begun + self._timeout
        last = begun + 1e9
        announced = begun
        hanging = False
        while not hanging and len(self._ends) < len(self._ranks.all):
            news = list(self._ranks.wait(_POLL))
            for rank, record in news:
                self._order.take(rank.number, record)
            now = time.monotonic()
            if news:
                deadline = now + self._patience()
            for rank in self._ranks.all:
                if rank.ended is not None:
                    self._ends.setdefault(rank.number, End(died=rank.ended))
            if self._order.parted:
                last = min(last, now + _AFTER_PARTING)
            if any(end.has_failed or end.reason == "forks" for end in self._ends.values()):
                last = min(last, now + _AFTER_FAILURE)
            if now > announced + _NEWS:
                announced = now
                self._announce(now - begun)
            hanging = now > min(deadline, last)
        return self._outcome(hanging, time.monotonic() - begun)

    def _announce(self, seconds: float) -> None:
        made = min(map(_steps, self._ranks.all))
        announce(f"ddpkit: {seconds:.0f} s, optimizer step {made} of at most {self._most}")

    def _patience(self) -> float:
        """Bound the time in which no rank tells anything."""
        if self._waits_for_helpers():
            return min(self._timeout, _AFTER_FAILURE)
        are_regular = [not end.reason and not end.died for end in self._ends.values()]
        if any(are_regular):
            return min(self._timeout, _AFTER_END)
        return self._timeout

    def _running(self) -> list[Rank]:
        return [rank for rank in self._ranks.all if rank.number not in self._ends]

    def _waits_for_helpers(self) -> bool:
        """Return whether all ranks that make steps were cut or have made enough, and others go on which make none."""
        if not self._order.are_cut_alike(*self._order.ranks):
            return True
        are_done = [end.reason == "steps" for end in self._ends.values()]
        return any(are_done) and all(are_done) and not any(map(_steps, self._running()))

    def _outcome(self, hanging: bool, seconds: float) -> Outcome:
        records = {rank.number: rank.records for rank in self._ranks.all}
        facts = Facts(records, self._order.parted)
        made = map(_steps, self._ranks.all)
        steps = min(filter(None, made), default=0)
        trouble, details = self._describe_trouble(hanging, steps)
        failed = {failure.name: failure.error for failure in facts.all(observed.Failure)}
        return Outcome(facts, steps, trouble, details, seconds, failed)

    def _describe_trouble(self, hanging: bool, steps: int) -> tuple[str, list[str]]:
        for number, end in self._ends.items():
            if end.reason == "forks":
                return "the script starts processes of its own: check the function that they run, as one rank", []
            if end.has_failed:
                trouble = f"rank {number} {_say_how(end, steps)}"
                if self._ranks.hides_gpus and not steps and re.search(_NO_GPU, end.error):
                    trouble += (
                        ". The script needs a GPU: try `--device cuda`, with which the CPU stands for missing ones"
                    )
                return trouble, self._ranks.all[number].tail()
        if hanging and not self._order.parted and not self._waits_for_helpers():
            return self._describe_hanging()
        if not steps:
            trouble = "the script ended without a step of a torch optimizer; did it resume a finished run?"
            return trouble, self._ranks.all[0].tail()
        return "", []

    def _describe_hanging(self) -> tuple[str, list[str]]:
        """Tell which ranks go on, and at which lines."""
        running = self._running()
        stacks = []
        for rank in running:
            stacks += [f"rank {rank.number}:", *rank.read_stack().splitlines()[1:7]]
        if not self._ends:
            return f"no rank made progress for {self._timeout:g} s", stacks
        ended = say_ranks(sorted(self._ends))
        return f"{say_ranks([rank.number for rank in running])} did not end after {ended} had ended", stacks


def _say_how(end: End, steps: int) -> str:
    after = f"after {steps} optimizer steps"
    if not end.error:
        return f"{end.died or f'exited with code {end.code}'} {after}"
    where = f" at {end.where[0]}" if end.where else ""
    return f"failed {after}{where}: {end.error}"


def _steps(rank: Rank) -> int:
    return max((record["step"] for record in rank.records), default=0)
