"""Run the script undisturbed and disturbed, and check how each trial ends."""

from __future__ import annotations

import importlib
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...collectives.tree import flat_bytes
from ..cli import count
from .rank import Start, plan_trial
from .runs import Options, Reference, Run, run_once

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

    def add(self, apart: float, where: str) -> None:
        """Take in a difference."""
        self.bits = False
        if apart > self.greatest:
            self.greatest = apart
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
    files = sorted((file for file in first.rglob("*") if file.is_file()), key=lambda file: file.stat().st_mtime)
    for file in files:
        expected = _read(file)
        if not expected:
            continue
        name = str(file.relative_to(first))
        if (second / name).is_file():
            difference.compared.append(name)
            found = _read(second / name)
            for path, entry in expected.items():
                where = f"{path} in {name}"
                apart = None if where in varying else _compare(entry, found.get(path))
                if apart is None:
                    continue
                if is_undisturbed and not (isinstance(entry, Tensor) and entry.is_floating_point()):
                    varying.add(where)
                else:
                    difference.add(apart, where)
    if name and name not in difference.compared:
        difference.add(math.inf, name)
    return difference


def _compare(entry: _Entry, other: _Entry | None) -> float | None:
    """Return the difference, relative to the greatest element; None if all is equal bit for bit."""
    if not isinstance(entry, Tensor) or not isinstance(other, Tensor):
        if type(entry) is not type(other):
            return math.inf
        entry, other = torch.tensor(entry), torch.tensor(other)
    if other.shape != entry.shape or other.dtype != entry.dtype:
        return math.inf
    if torch.equal(flat_bytes(entry), flat_bytes(other)):
        return None
    return _relative(entry, other) if entry.is_floating_point() else math.inf


def _relative(tensor: Tensor, other: Tensor) -> float:
    """Return the greatest difference, relative to the greatest element; infinite if one of the two is NaN somewhere."""
    first, second = tensor.double(), other.double()
    apart = (first - second).abs()
    apart[(first == second) | (first.isnan() & second.isnan())] = 0
    scale = float(first.nan_to_num().abs().max())
    relative = float(apart.max()) / max(scale, torch.finfo(torch.float64).tiny)
    return math.inf if math.isnan(relative) else relative


def _read(file: Path) -> dict[str, _Entry]:
    """Read the tensors and numbers of a file, by their place in it; {} if it is none that torch reads safely."""
    try:
        if file.suffix == ".safetensors":
            return dict(importlib.import_module("safetensors.torch").load_file(file))
        with file.open("rb") as start:
            if start.read(2) != b"PK":  # the archive that `torch.save` writes
                return {}
        return dict(_entries(torch.load(file, map_location="cpu", weights_only=True), ""))
    except Exception:
        return {}


def _entries(value: Any, path: str) -> Iterator[tuple[str, _Entry]]:
    children: Any = ()
    if isinstance(value, Tensor):
        is_state = value.dtype == torch.uint8  # of a generator
        if value.layout == torch.strided and not (value.is_meta or value.is_complex() or is_state):
            yield path.removeprefix("."), value
    elif isinstance(value, int | float):
        yield path.removeprefix("."), value
    elif isinstance(value, Mapping):
        children = value.items()
    elif isinstance(value, list | tuple) and not (len(value) > _MANY and isinstance(value[0], int)):
        children = enumerate(value)
    for key, child in children:
        yield from _entries(child, f"{path}.{key}")


_TOLERANCE = 1e-3  # relative difference of tensors in files, where undisturbed runs agree exactly
_MARGIN = 10  # times the difference between undisturbed runs
_WHOLE = "undisturbed"  # the folder of the first run


class UnfitScriptError(Exception):
    """The script cannot be rehearsed."""

    def __init__(self, reason: str, output: list[str]) -> None:
        super().__init__(reason)
        self.output = output


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
        options: What to rehearse.
        folder: An empty folder for the runs.
        announce: Called with a text before each run.

    Attributes:
        reference: The steps of the undisturbed run; None if two runs on as many ranks differ: nothing can be compared.
        excluded: Why runs on some numbers of ranks are not compared with others, by that number.
        length: The steps of the undisturbed run.
    """

    def __init__(self, options: Options, folder: Path, announce: Callable[[str], None]) -> None:
        self._options = options
        self._folder = folder
        self._announce = announce
        self.reference: Reference | None = None
        self.excluded: dict[int, str] = {}
        self.length = 0
        self._undisturbed: dict[int, Run] = {}
        self._differences: list[Difference] = []  # between the files of undisturbed runs
        self._varying: set[str] = set()  # numbers in these files that differ

    def run_undisturbed(self) -> None:
        """Run the script on each number of ranks, on the first one twice.

        Raises:
            UnfitScriptError: If it fails, or makes no step.
        """
        first, *others = self._options.ranks
        run = self._undisturbed[first] = self._run_whole(first, _WHOLE)
        self.length = len(run.steps)
        if self.length < 2:
            reason = "the script made fewer than two steps of a torch optimizer in the processes that were started"
            raise UnfitScriptError(reason, run.output)
        if not all(step["weights"] for step in run.steps):
            reason = "each rank holds a part of all weights, as FSDP's first version does: use fully_shard"
            raise UnfitScriptError(reason, [])
        self.reference = Reference(run)
        reason = self._compare(self.reference, self._run_whole(first, "repeated"), "repeated")
        if reason:
            self.excluded[first] = reason
            self.reference = None
        for ranks in others:
            if reason := self._run_other(ranks, f"{_WHOLE}-{ranks}"):
                self.excluded[ranks] = reason

    def run_trial(self, number: int) -> Trial:
        """Run a trial: disturb the script, and start it again until it has ended undisturbed."""
        events = {ranks: run.events for ranks, run in self._undisturbed.items()}
        name = f"trial-{number}"
        runs: list[Run] = []
        made = 0
        for start in plan_trial(self._options.seed, number, self._options.kinds, events):
            self._announce(f"trial {number}, {count(start.ranks, 'rank')}")
            run = run_once(self._options, self._folder / name, start, is_again=bool(runs))
            runs.append(run)
            if self.reference is None:
                continue
            run.alignment = self.reference.follow(run, made)
            ends = [last for _, last in run.alignment.stretches]
            made = max([made, *ends])
            if ends and ends[-1] == self.length and all(rank in _survived(run) for rank in run.failed):
                break  # it came to the end of the script, also if the others went on after one was killed
        trial = Trial(number, runs, compare_files(self._folder / _WHOLE, self._folder / name, self._varying))
        self._check_ends(trial)
        self._check_steps(trial)
        self._check_files(trial)
        if not trial.wrong:
            shutil.rmtree(self._folder / name, ignore_errors=True)
        return trial

    def _run_whole(self, ranks: int, name: str) -> Run:
        """Run the script undisturbed, to its end."""
        self._announce(f"undisturbed, {count(ranks, 'rank')}")
        run = run_once(self._options, self._folder / name, Start(ranks, None), is_again=False)
        if run.hanging:
            raise UnfitScriptError(f"the script hangs on {count(ranks, 'rank')}, undisturbed", run.hanging)
        if run.failed:
            rank = run.failed[0]
            reason = f"the script failed on {count(ranks, 'rank')}, undisturbed: rank {rank} {run.ends[rank]}"
            raise UnfitScriptError(reason, run.output)
        return run

    def _run_other(self, ranks: int, name: str) -> str:
        """Run the script undisturbed on another number of ranks; return why that is left out, "" if it is not."""
        try:
            run = self._run_whole(ranks, name)
        except UnfitScriptError as error:
            return str(error)
        reason = self._compare(self.reference, run, name) if self.reference else ""
        if not reason:
            self._undisturbed[ranks] = run
        return reason

    def _compare(self, reference: Reference, run: Run, name: str) -> str:
        """Learn from another undisturbed run; return why it cannot be compared, "" if it can."""
        reason = reference.add(run)
        if not reason:
            folders = self._folder / _WHOLE, self._folder / name
            self._differences.append(compare_files(*folders, self._varying, is_undisturbed=True))
        return reason

    def _check_ends(self, trial: Trial) -> None:
        """Check how the processes ended."""
        for run in trial.runs:
            ranks = count(run.start.ranks, "rank")
            if run.hanging:
                text = f"on {ranks}, some did not end within {self._options.grace:g} s"
                trial.notes += [text, *run.hanging]
            if run.failed and not run.is_disturbed:
                rank = run.failed[0]
                trial.wrong.append(f"started again on {ranks}, it failed: rank {rank} {run.ends[rank]}")
                trial.notes += run.output
                break  # later starts fail as well

    def _check_steps(self, trial: Trial) -> None:
        """Check whether each step was made, and as in the undisturbed run."""
        made = 0
        for alignment in filter(None, [run.alignment for run in trial.runs]):
            for first, last in alignment.stretches:
                if first > made + 1:
                    trial.wrong.append(f"steps {made + 1} to {first - 1} were never made")
                made = max(made, last)
            if alignment.first_difference:
                trial.wrong.append(alignment.first_difference)
                break  # later starts go on from there
        if self.reference and not trial.wrong and made < self.length:
            trial.wrong.append(f"it ended after step {made} of {self.length}")

    def _check_files(self, trial: Trial) -> None:
        """Check whether the files at the end hold the same, as far as those of undisturbed runs do."""
        difference = trial.difference
        if trial.wrong or self.reference is None:
            return
        usual = [_MARGIN * other.greatest for other in self._differences]
        if self._options.exact and not difference.compared:
            trial.wrong.append("no file holds tensors or numbers that could be compared bit for bit")
        elif self._options.exact and not difference.bits:
            trial.wrong.append(f"not equal bit for bit: {difference.where}")
        elif math.isinf(difference.greatest) and not math.isinf(max(usual)):
            trial.wrong.append(f"{difference.where} is missing or not finite, or differs in number, shape or type")
        elif difference.greatest > max(_TOLERANCE, *usual):
            trial.wrong.append(f"{difference.where} differs by {difference.greatest:.2g} of its greatest element")


def _survived(run: Run) -> list[int]:
    """List the rank that was killed, if others made steps without it."""
    disturbance = run.start.disturbance
    if disturbance is None or disturbance.kind != "kill":
        return []
    made = sum(record["what"] == "step" for record in run.events[disturbance.rank])
    return [disturbance.rank] if made < len(run.steps) else []
