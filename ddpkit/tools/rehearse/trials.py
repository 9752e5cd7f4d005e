"""Run the script undisturbed and disturbed, and compare the steps and the files of each trial."""

from __future__ import annotations

import argparse
import importlib
import math
import os
import random
import shlex
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...collectives.tree import flat_bytes
from ..cli import UnfitScriptError, announce, count
from ..ranks import FOLDER, Rank, Ranks, Script
from ..recorder import Record
from .rank import Disturbance, be_rank, signal_of

_POLL = 0.05  # seconds
RankEvents = dict[int, list[Record]]  # of an undisturbed run, by rank


@dataclass
class Run:
    """One start of the script, and how it went.

    Attributes:
        ranks: How many.
        disturbance: What happens to them; None for nothing.
        steps: The step records of the rank that made the most steps.
        events: Of each rank.
        is_disturbed: Whether the disturbance came.
        event: The event at which it came, "" if it came at a step or not at all.
        ends: How each rank ended, with its error.
        failed: The ranks that did not end with code 0.
        waited: Seconds from the disturbance, or from the first end if there was none, to the end of the last rank.
        hanging: The stacks of the ranks that did not end by themselves.
        output: The last lines of a rank that failed.
        uses_cuda: Whether the script uses CUDA, for which the CPU stands.
        stretches: The first and the last of steps of the undisturbed run that it has made one after the other,
            counted from 1; None if they cannot be compared.
        first_difference: How the first unequal step differs, "" if all are equal.
    """

    ranks: int
    disturbance: Disturbance | None
    steps: list[Record] = field(default_factory=list)
    events: RankEvents = field(default_factory=dict)
    is_disturbed: bool = False
    event: str = ""
    ends: dict[int, str] = field(default_factory=dict)
    failed: list[int] = field(default_factory=list)
    waited: float = 0.0
    hanging: list[str] = field(default_factory=list)
    output: list[str] = field(default_factory=list)
    uses_cuda: bool = False
    stretches: list[list[int]] | None = None
    first_difference: str = ""


def run_once(args: argparse.Namespace, folder: Path, run: Run, is_again: bool = False) -> None:
    """Run the script once, and leave no process behind.

    Args:
        args: The flags of the tool.
        folder: The folder in which it saves; it runs there if its arguments do not name it.
        run: On how many ranks, and what happens to them; takes how they went.
        is_again: Whether it was started there before.
    """
    folder.mkdir(exist_ok=True)
    arguments = args.arguments
    again = shlex.split(args.again)
    is_inside = not any(FOLDER in argument for argument in arguments + again)
    if is_again:
        arguments = arguments + again
    path = args.script if args.module else os.path.abspath(args.script)
    script = Script(path, [argument.replace(FOLDER, str(folder)) for argument in arguments], args.module)
    with Ranks(partial(be_rank, script, folder, is_inside, run.disturbance), run.ranks, args.device) as ranks:
        _follow(ranks, run, args)
        _describe(ranks, run)


def _follow(ranks: Ranks, run: Run, args: argparse.Namespace) -> None:
    """Wait until all ranks have ended, or end them when their time is up."""
    progress = time.monotonic()  # when a rank recorded something last
    begin: float | None = None  # when the ranks began to have to end
    limit = args.timeout
    while any(rank.ended is None for rank in ranks.all):
        for _, record in ranks.wait(_POLL):
            progress = time.monotonic()
            if record["kind"] == "disturbed":
                begin = progress
                run.is_disturbed = True
                run.event = "" if record["what"] == "step" else record["what"]
                _signal_all(ranks, run.disturbance)
        if begin is None and any(rank.ended is not None for rank in ranks.all):
            begin = progress = time.monotonic()
        if begin is not None:
            limit = min(args.timeout, args.grace)
        if time.monotonic() > progress + limit:
            run.hanging += _kill_hanging(ranks)
    if begin is not None:
        run.waited = time.monotonic() - begin


def _signal_all(ranks: Ranks, disturbance: Disturbance | None) -> None:
    """Send the signals that all ranks get."""
    if disturbance is None or not disturbance.kind.endswith("-all"):
        return
    for rank in ranks.all:
        with suppress(ProcessLookupError):
            os.kill(rank.pid, signal_of(disturbance.kind))


def _kill_hanging(ranks: Ranks) -> list[str]:
    """Kill the ranks that do not end; return where they were."""
    running = [rank for rank in ranks.all if rank.ended is None]
    stacks = []
    for rank in running:
        stacks += [f"rank {rank.number}:", *rank.read_stack().splitlines()[1:6]]
    for rank in running:
        rank.kill()
        rank.reap(wait=True)
    return stacks


def _describe(ranks: Ranks, run: Run) -> None:
    """Describe how the ranks ended, by what they have recorded."""
    for rank in ranks.all:
        rank.read()
        run.events[rank.number] = _of_kind(rank, "event")
        run.uses_cuda = run.uses_cuda or bool(_of_kind(rank, "cuda"))
        run.steps = max(run.steps, _of_kind(rank, "step"), key=len)
        errors = [record["error"] for record in _of_kind(rank, "end") if record["error"]]
        run.ends[rank.number] = ": ".join([f"{rank.ended}", *errors])
        if rank.ended != "exited with code 0":
            run.failed.append(rank.number)
            run.output = run.output or rank.tail()


def _of_kind(rank: Rank, kind: str) -> list[Record]:
    return [record for record in rank.records if record["kind"] == kind]


# Draw the disturbances of a trial from its seed.

_TWICE = 0.3  # share of the trials that are disturbed a second time
_LATE = 0.5  # share of the disturbances that come some time after an event, not at it
_LONGEST = 5.0  # seconds


def plan_trial(seed: int, number: int, kinds: Sequence[str], undisturbed: dict[int, RankEvents]) -> list[Run]:
    """Draw the starts of a trial, the last of which is not disturbed.

    Args:
        seed: Of all trials.
        number: Of this trial, counted from 1; the kinds take turns, and so do changes of files and other moments.
        kinds: The kinds of disturbances.
        undisturbed: The events of undisturbed runs, by their number of ranks.
    """
    generator = random.Random(f"{seed} {number}")
    turns, which = divmod(number - 1, len(kinds))
    kind = kinds[which]
    ranks = generator.choice(list(undisturbed))
    starts: list[Run] = []
    while True:
        is_even = (turns + which + len(starts)) % 2 == 0
        starts.append(Run(ranks, _draw(generator, kind, undisturbed[ranks], is_even)))
        if others := [number for number in undisturbed if number != ranks]:
            ranks = generator.choice(others)
        if len(starts) > 1 or generator.random() >= _TWICE:
            return [*starts, Run(ranks, None)]
        kind = generator.choice(kinds)


def _draw(generator: random.Random, kind: str, events: RankEvents, at_change: bool) -> Disturbance:
    """Draw a moment of an undisturbed run: one at which a file is about to be changed, or else far from these.

    Far from them is a step that no change follows, as one does at the end of an epoch: later in the run than the first
    change, for before there is nothing to resume from.
    """
    moments: list[_Moment] = []
    for rank, records in events.items():
        moments += [_Moment(rank, number, *pair) for number, pair in enumerate(pairwise(records))]
    changes = [moment for moment in moments if _is_change(moment.event)]
    first = min((moment.event["time"] for moment in changes), default=0.0)
    late = [moment for moment in moments if moment.event["time"] > first]
    between = [moment for moment in late if not _is_change(moment.event) and not _is_change(moment.following)]
    chosen = generator.choice((changes if at_change else between) or moments)
    delay = 0.0
    if generator.random() < _LATE and not chosen.event["what"].startswith("write "):  # in which ranks are killed
        gap = chosen.following["time"] - chosen.event["time"]
        delay = generator.uniform(0, min(gap, _LONGEST))
    return Disturbance(kind, chosen.rank, chosen.number, delay)


class _Moment(NamedTuple):
    rank: int
    number: int
    event: Record
    following: Record


def _is_change(event: Record) -> bool:
    return event["what"] not in ("start", "step", "end")


# Compare the steps of a run that was disturbed with those of undisturbed runs.
#
# Distances between weights are given in steps: 1 is as far as a step of the optimizer moves them.

_TOLERANCE = 1e-3  # of a step, beyond which weights are not equal even if undisturbed runs agree exactly
_MARGIN = 10  # times the distance between undisturbed runs, also of their files
_COMPARABLE = 0.1  # of a step; undisturbed runs that are farther apart cannot be compared
_GREATEST = 0.2  # of a step, the greatest tolerance
_TINY = float(np.finfo(np.float64).tiny)
_ALIKE = 1e-6  # relative difference of learning rates


class Reference:
    """The steps of an undisturbed run, and how far others that were not disturbed are from them.

    Args:
        run: The undisturbed run.

    Attributes:
        length: The number of steps.
        distance: The greatest between undisturbed runs that can be compared.
    """

    def __init__(self, run: Run) -> None:
        self._steps = run.steps
        self._inputs = {run.ranks: [step["inputs"] for step in run.steps]}
        self._sizes = _step_sizes(run.steps)
        self.length = len(run.steps)
        self.distance = 0.0

    @property
    def tolerance(self) -> float:
        """Return the distance up to which two steps count as equal, in steps."""
        return min(max(_TOLERANCE, _MARGIN * self.distance), _GREATEST)

    def add(self, other: Run) -> str:
        """Learn from another undisturbed run how far equal runs are apart.

        Returns:
            Why that run cannot be compared, "" if it can.
        """
        if len(other.steps) != self.length:
            return f"{len(other.steps)} steps, not {self.length}"
        greatest = max(self._distance(step, number) for number, step in enumerate(other.steps))
        if greatest > _COMPARABLE:
            return f"weights up to {greatest:.2g} of a step apart"
        self.distance = max(self.distance, greatest)
        self._inputs[other.ranks] = [step["inputs"] for step in other.steps]
        return ""

    def follow(self, run: Run, made: int = 0) -> Run:
        """Find the steps of a run among those of the undisturbed run, the first one near the last that was made."""
        stretches = run.stretches = []
        expected = made
        for step in run.steps:
            if not stretches or not self._distance(step, expected) <= self.tolerance:
                position = self._find(step, expected)
                if not self._distance(step, position) <= self.tolerance:
                    run.first_difference = self._explain(step, expected if stretches else position, run.ranks)
                    break
                expected = position
                stretches.append([position + 1, position])
            expected += 1
            stretches[-1][1] = expected
        return run

    def _distance(self, step: Record, position: int, when: str = "weights") -> float:
        """Return the distance of a step from one of the undisturbed run, after it or "before"."""
        if position >= self.length:
            return math.inf
        other = self._steps[position]
        if step["optimizer"] != other["optimizer"] or len(step[when]) != len(other[when]):
            return math.inf
        return _distance(step[when], other[when]) / self._sizes[step["optimizer"]]

    def _find(self, step: Record, expected: int) -> int:
        """Find the equal step nearest to the expected one; else one that begins alike; else the most similar one."""
        positions = range(self.length)
        for when in ("weights", "before"):
            equal = [position for position in positions if self._distance(step, position, when) <= self.tolerance]
            if equal:
                return min(equal, key=lambda position: abs(position - expected))
        return min(positions, key=lambda position: self._distance(step, position))

    def _explain(self, step: Record, position: int, ranks: int) -> str:
        """Say what is different in a step: the learning rate, the weights before it, the samples, or something else."""
        if position >= self.length:
            return f"it continued after step {self.length}, the last of the undisturbed run"
        distance = self._distance(step, position)
        text = f"step {position + 1} is {distance:.2g} of a step away from the undisturbed run's"
        rates, meant = step["rates"], self._steps[position]["rates"]
        if len(rates) != len(meant) or not np.allclose(rates, meant, rtol=_ALIKE):
            return f"{text}: learning rate {rates}, not {meant}"
        text = f"{text}, with the same learning rate"
        inputs = self._inputs.get(ranks, [])
        if not self._distance(step, position, "before") <= self.tolerance:
            return f"{text}: the weights differ before it"
        if not step["inputs"] or not inputs or step["rank"]:  # the others read other samples
            return f"{text}: samples, optimizer state or random numbers"
        if step["inputs"] == inputs[position]:
            return f"{text}, weights and inputs: the optimizer state or random numbers differ"
        if step["inputs"] in inputs:
            return f"{text} and weights: the inputs are those of step {inputs.index(step['inputs']) + 1}"
        return f"{text} and weights: the inputs differ"


def _step_sizes(steps: list[Record]) -> dict[str, float]:
    """Measure how far each optimizer's step moves its weights: the median of its steps."""
    moved: dict[str, list[float]] = {}
    for step in steps:
        moved.setdefault(step["optimizer"], []).append(_distance(step["before"], step["weights"]))
    return {name: max(float(np.median(lengths)), _TINY) for name, lengths in moved.items()}


def _distance(weights: list[float], others: list[float]) -> float:
    return float(np.linalg.norm(np.subtract(weights, others)))


# Compare the tensors and numbers in the files of two folders.

_Entry = Tensor | int | float
_MANY = 600  # numbers in a list: more are the state of a generator, which Python's has 625 of


@dataclass
class Difference:
    """How the files of two runs differ.

    Attributes:
        compared: Files with tensors or numbers that are in both folders.
        greatest: Of all differences, relative to the greatest element; infinite where something is missing, or a
            whole number is another.
        where: The file, and the tensor or number in it.
        bits: Whether all is equal bit for bit.
    """

    compared: list[str] = field(default_factory=list)
    greatest: float = 0.0
    where: str = ""
    bits: bool = True

    def add(self, distance: float, where: str) -> None:
        """Take in a difference."""
        self.bits = False
        if distance > self.greatest:
            self.greatest = distance
            self.where = where


def compare_files(first: Path, second: Path, varying: set[str], is_undisturbed: bool = False) -> Difference:
    """Compare the files of two runs that have the same name and hold tensors, as far as torch reads them safely.

    The second run may lack any but the last one.

    Args:
        first: The folder of a run.
        second: That of another.
        varying: What is not compared, since it differs between undisturbed runs, such as times.
        is_undisturbed: Whether both runs were undisturbed: then numbers that differ are added to `varying`.
    """
    difference = Difference()
    name = ""
    files = [file for file in first.rglob("*") if file.is_file()]
    for file in sorted(files, key=lambda file: file.stat().st_mtime):
        expected = _read(file)
        if not expected:
            continue
        name = str(file.relative_to(first))
        if not (second / name).is_file():
            continue
        difference.compared.append(name)
        found = _read(second / name)
        for path, entry in expected.items():
            where = f"{path} in {name}"
            distance = _compare(entry, found.get(path))
            if distance is None or where in varying:
                continue
            if is_undisturbed and not (isinstance(entry, Tensor) and entry.is_floating_point()):
                varying.add(where)
            else:
                difference.add(distance, where)
    if name and name not in difference.compared:
        difference.add(math.inf, name)
    return difference


def _compare(entry: _Entry, other: _Entry | None) -> float | None:
    """Return the difference, relative to the greatest element; None if all is equal bit for bit.

    It is infinite where one of the two has another type or shape, another whole number, or is NaN alone.
    """
    if type(entry) is not type(other):
        return math.inf
    if isinstance(entry, int):  # of any length
        return None if entry == other else math.inf
    first, second = torch.as_tensor(entry), torch.as_tensor(other)
    if first.shape != second.shape or first.dtype != second.dtype:
        return math.inf
    if torch.equal(flat_bytes(first), flat_bytes(second)):
        return None
    if not first.is_floating_point():
        return math.inf
    first, second = first.double(), second.double()
    distance = (first - second).abs()
    distance[(first == second) | (first.isnan() & second.isnan())] = 0
    relative = float(distance.max()) / max(float(first.nan_to_num().abs().max()), _TINY)
    return math.inf if math.isnan(relative) else relative


def _read(file: Path) -> dict[str, _Entry]:
    """Read the tensors and numbers of a file, by their place in it; {} if it is none that torch reads safely."""
    try:
        if file.suffix == ".safetensors":
            return dict(importlib.import_module("safetensors.torch").load_file(file))
        with file.open("rb") as start:
            if start.read(2) != b"PK":  # the archive that `torch.save` writes
                return {}
        return dict(_entries(torch.load(file, map_location="cpu", weights_only=True)))
    except Exception:
        return {}


def _entries(value: Any, path: str = "") -> Iterator[tuple[str, _Entry]]:
    children: Any = ()
    if isinstance(value, Mapping):
        children = value.items()
    elif isinstance(value, list | tuple) and not (len(value) > _MANY and isinstance(value[0], int)):
        children = enumerate(value)
    elif isinstance(value, int | float) or (isinstance(value, Tensor) and _is_comparable(value)):
        yield path, value
    for key, child in children:
        yield from _entries(child, f"{path}.{key}" if path else str(key))


def _is_comparable(tensor: Tensor) -> bool:
    is_state = tensor.dtype == torch.uint8  # of a generator
    return tensor.layout == torch.strided and not (tensor.is_meta or tensor.is_complex() or is_state)


_FILE_TOLERANCE = 1e-3  # relative difference of tensors in files, where undisturbed runs agree exactly
_WHOLE = "undisturbed"  # the folder of the first run


@dataclass
class Trial:
    """How a trial went.

    Attributes:
        number: Counted from 1.
        runs: The starts of the script.
        difference: Of the files at the end.
        wrong: What was wrong, nothing if it ended like the undisturbed run.
        notes: What is worth knowing.
    """

    number: int
    runs: list[Run]
    difference: Difference
    wrong: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class Rehearsal:
    """All runs of a script.

    Args:
        args: The flags of the tool.
        folder: An empty folder for the runs.

    Attributes:
        reference: The steps of the undisturbed run; None if two runs on as many ranks differ: nothing can be compared.
        excluded: Why runs on some numbers of ranks are not compared with others, by that number.
        length: The steps of the undisturbed run.
        uses_cuda: Whether the script uses CUDA, for which the CPU stands.
    """

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self._args = args
        self._folder = folder
        self.reference: Reference | None = None
        self.excluded: dict[int, str] = {}
        self.length = 0
        self.uses_cuda = False
        self._events: dict[int, RankEvents] = {}  # of undisturbed runs, by their number of ranks
        self._usual = 0.0  # the greatest difference between the files of undisturbed runs
        self._varying: set[str] = set()  # numbers in these files that differ

    def run_undisturbed(self) -> None:
        """Run the script on each number of ranks, on the first one twice.

        Raises:
            UnfitScriptError: If it fails, or makes no step.
        """
        first, *others = self._args.ranks
        run = self._run_whole(first, _WHOLE)
        self.length = len(run.steps)
        self.uses_cuda = run.uses_cuda
        if self.length < 2:
            reason = "the script made fewer than two steps of a torch optimizer in the processes that were started"
            raise UnfitScriptError(reason, *run.output)
        if not all(step["weights"] for step in run.steps):
            reason = "each rank holds a part of all weights, as FSDP's first version does: use fully_shard"
            raise UnfitScriptError(reason)
        self._events[first] = run.events
        self.reference = Reference(run)
        if reason := self._compare(self._run_whole(first, "repeated"), "repeated"):
            self.excluded[first] = reason
            self.reference = None
        for ranks in others:
            name = f"{_WHOLE}-{ranks}"
            try:
                run = self._run_whole(ranks, name)
                reason = self._compare(run, name)
            except UnfitScriptError as error:
                reason = error.args[0]
            if reason:
                self.excluded[ranks] = reason
            else:
                self._events[ranks] = run.events

    def run_trial(self, number: int) -> Trial:
        """Run a trial: disturb the script, and start it again until it has ended undisturbed."""
        folder = self._folder / f"trial-{number}"
        runs: list[Run] = []
        made = 0
        for run in plan_trial(self._args.seed, number, self._args.kinds, self._events):
            announce(f"trial {number}, {count(run.ranks, 'rank')}")
            run_once(self._args, folder, run, is_again=bool(runs))
            runs.append(run)
            if self.reference is None:
                continue
            ends = [last for _, last in self.reference.follow(run, made).stretches or ()]
            made = max([made, *ends])
            if ends and ends[-1] == self.length and all(rank in _survived(run) for rank in run.failed):
                break  # it came to the end of the script, also if the others went on after one was killed
        trial = Trial(number, runs, compare_files(self._folder / _WHOLE, folder, self._varying))
        self._check_ends(trial)
        self._check_steps(trial)
        self._check_files(trial)
        if not trial.wrong:
            shutil.rmtree(folder, ignore_errors=True)
        return trial

    def _run_whole(self, ranks: int, name: str) -> Run:
        """Run the script undisturbed, to its end."""
        where = f"{count(ranks, 'rank')}, undisturbed"
        announce(f"undisturbed, {count(ranks, 'rank')}")
        run = Run(ranks, None)
        run_once(self._args, self._folder / name, run)
        if run.hanging:
            raise UnfitScriptError(f"the script hangs on {where}", *run.hanging)
        if run.failed:
            rank = run.failed[0]
            raise UnfitScriptError(f"the script failed on {where}: rank {rank} {run.ends[rank]}", *run.output)
        return run

    def _compare(self, run: Run, name: str) -> str:
        """Learn from another undisturbed run; return why it cannot be compared, "" if it can."""
        if self.reference is None:
            return ""
        reason = self.reference.add(run)
        if not reason:
            folders = self._folder / _WHOLE, self._folder / name
            difference = compare_files(*folders, self._varying, is_undisturbed=True)
            self._usual = max(self._usual, difference.greatest)
        return reason

    def _check_ends(self, trial: Trial) -> None:
        """Check how the processes ended."""
        for run in trial.runs:
            ranks = count(run.ranks, "rank")
            if run.hanging:
                text = f"on {ranks}, some did not end within {self._args.grace:g} s"
                trial.notes += [text, *run.hanging]
            if run.failed and not run.is_disturbed:
                rank = run.failed[0]
                trial.wrong.append(f"started again on {ranks}, it failed: rank {rank} {run.ends[rank]}")
                trial.notes += run.output
                break  # later starts fail as well

    def _check_steps(self, trial: Trial) -> None:
        """Check whether each step was made, and as in the undisturbed run."""
        made = 0
        for run in trial.runs:
            for first, last in run.stretches or ():
                if first > made + 1:
                    trial.wrong.append(f"steps {made + 1} to {first - 1} were never made")
                made = max(made, last)
            if run.first_difference:
                trial.wrong.append(run.first_difference)
                break  # later starts go on from there
        if self.reference and not trial.wrong and made < self.length:
            trial.wrong.append(f"it ended after step {made} of {self.length}")

    def _check_files(self, trial: Trial) -> None:
        """Check whether the files at the end hold the same, as far as those of undisturbed runs do."""
        difference = trial.difference
        if trial.wrong or self.reference is None:
            return
        if self._args.exact and not difference.compared:
            trial.wrong.append("no file holds tensors or numbers that could be compared bit for bit")
        elif self._args.exact and not difference.bits:
            trial.wrong.append(f"not equal bit for bit: {difference.where}")
        elif math.isinf(difference.greatest) and not math.isinf(self._usual):
            trial.wrong.append(f"{difference.where} is missing or not finite, or differs in number, shape or type")
        elif difference.greatest > max(_FILE_TOLERANCE, _MARGIN * self._usual):
            trial.wrong.append(f"{difference.where} differs by {difference.greatest:.2g} of its greatest element")


def _survived(run: Run) -> list[int]:
    """List the rank that was killed, if others made steps without it."""
    if run.disturbance is None or run.disturbance.kind != "kill":
        return []
    rank = run.disturbance.rank
    made = sum(event["what"] == "step" for event in run.events[rank])
    return [rank] if made < len(run.steps) else []
