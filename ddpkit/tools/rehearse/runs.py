"""Run the script once on ranks of this machine, disturb it, and see how each rank ends."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..script.ranks import Rank, Ranks, Script, environment
from ..script.recorder import Record
from .rank import RankEvents, Start, be_rank

_POLL = 0.05  # seconds
_PAUSE = 2.0  # seconds for which a rank is stopped


@dataclass
class Run:
    """How one start of the script went.

    Attributes:
        start: What was started.
        steps: The step records of the rank that made the most steps.
        inputs: The sum over all ranks of the hashes of each step's samples, None where it is not known.
        events: Of each rank.
        disturbed: The event at which the disturbance came, "" if it came at a step or not at all.
        is_disturbed: Whether the disturbance came.
        ends: How each rank ended, with its error.
        failed: The ranks that did not end with code 0.
        waited: Seconds from the disturbance, or from the first end if there was none, to the end of the last rank.
        hanging: The stacks of the ranks that did not end by themselves.
        output: The last lines of a rank that failed.
        alignment: How its steps follow the undisturbed run's; None if they cannot be compared.
    """

    start: Start
    steps: list[Record] = field(default_factory=list)
    inputs: list[int | None] = field(default_factory=list)
    events: RankEvents = field(default_factory=dict)
    disturbed: str = ""
    is_disturbed: bool = False
    ends: dict[int, str] = field(default_factory=dict)
    failed: list[int] = field(default_factory=list)
    waited: float = 0.0
    hanging: list[str] = field(default_factory=list)
    output: list[str] = field(default_factory=list)
    alignment: Alignment | None = None


@dataclass(frozen=True)
class Limits:
    """How long to wait.

    Attributes:
        silence: Seconds without any record after which a run counts as hanging.
        grace: Seconds in which all ranks have to end once one has ended or was disturbed, before they are ended.
    """

    silence: float
    grace: float


def run_once(script: Script, folder: Path, is_inside: bool, start: Start, limits: Limits, device: str) -> Run:
    """Run the script once, and leave no process behind.

    Args:
        script: The script.
        folder: The folder in which it saves.
        is_inside: Whether it runs in that folder.
        start: On how many ranks, and what happens to them.
        limits: How long to wait.
        device: "cpu" hides the GPUs.
    """
    body = partial(be_rank, script, folder, is_inside, start.disturbance)
    environments = {rank: environment(rank, start.ranks, device) for rank in range(start.ranks)}
    with Ranks(body, environments) as ranks:
        return _Follower(ranks, start, limits).run()


class _Follower:
    """Follows the ranks to their end."""

    def __init__(self, ranks: Ranks, start: Start, limits: Limits) -> None:
        self._ranks = ranks
        self._limits = limits
        self._result = Run(start)
        self._heard = time.monotonic()  # when a rank recorded something last
        self._counted_from: float | None = None  # when the ranks began to have to end
        self._paused: tuple[Rank, float] | None = None

    def run(self) -> Run:
        """Wait until all ranks have ended, or end them when their time is up."""
        while any(rank.ended is None for rank in self._ranks.all):
            for rank, record in self._ranks.wait(_POLL):
                self._heard = time.monotonic()
                if record["kind"] == "disturbed":
                    self._disturb(rank, record["what"])
            self._let_go_on()
            if self._is_time_up():
                self._end()
        for rank in self._ranks.all:
            rank.read()
        return self._describe()

    def _disturb(self, rank: Rank, what: str) -> None:
        """Do what a rank cannot do to itself."""
        run = self._result
        run.is_disturbed = True
        run.disturbed = "" if what == "step" else what
        disturbance = run.start.disturbance
        assert disturbance is not None
        if disturbance.kind == "pause":
            self._paused = (rank, time.monotonic() + _PAUSE)
            return
        self._counted_from = time.monotonic()
        if disturbance.kind.endswith("-all"):
            number = signal.SIGKILL if disturbance.kind == "kill-all" else signal.SIGTERM
            for other in self._ranks.all:
                with suppress(ProcessLookupError):
                    os.kill(other.pid, number)

    def _let_go_on(self) -> None:
        """Let a rank that was stopped go on after a while."""
        if self._paused is None:
            return
        rank, until = self._paused
        if time.monotonic() < until:
            return
        with suppress(ProcessLookupError):
            os.kill(rank.pid, signal.SIGCONT)
        self._paused = None

    def _is_time_up(self) -> bool:
        now = time.monotonic()
        if self._counted_from is None and any(rank.ended is not None for rank in self._ranks.all):
            self._counted_from = now
        begun = self._counted_from
        if begun is not None and now > max(begun, self._heard) + self._limits.grace:
            return True
        return now > self._heard + self._limits.silence

    def _end(self) -> None:
        """Note where the ranks are that do not end, and kill them."""
        running = [rank for rank in self._ranks.all if rank.ended is None]
        for rank in running:
            self._result.hanging += [f"rank {rank.number}:", *rank.read_stack().splitlines()[1:6]]
        for rank in running:
            rank.kill()
            rank.reap(wait=True)

    def _describe(self) -> Run:
        run = self._result
        if self._counted_from is not None:
            run.waited = time.monotonic() - self._counted_from
        steps = []
        for rank in self._ranks.all:
            run.events[rank.number] = [record for record in rank.records if record["kind"] == "event"]
            steps.append([record for record in rank.records if record["kind"] == "step"])
            run.ends[rank.number] = _describe_end(rank)
            if rank.ended != "exited with code 0":
                run.failed.append(rank.number)
                run.output = run.output or rank.tail()
        run.steps = max(steps, key=len)
        run.inputs = [_total(step, steps) for step in range(len(run.steps))]
        return run


def _describe_end(rank: Rank) -> str:
    """Say how a rank ended, with its error if it reported one."""
    errors = [record["error"] for record in rank.records if record["kind"] == "end" and record["error"]]
    return ": ".join([f"{rank.ended}", *errors])


def _total(step: int, steps: list[list[Record]]) -> int | None:
    """Add up the hashes of all ranks' samples in a step, if all have recorded them."""
    total = 0
    for made in steps:
        if step >= len(made) or made[step]["inputs"] is None:
            return None
        total += made[step]["inputs"]
    return total


# Compare the steps of a run that was disturbed with those of undisturbed runs.
#
# Distances between weights are given in steps: 1 is as far as a step of the optimizer moves them.

_TOLERANCE = 1e-3  # of a step, beyond which weights are not equal even if undisturbed runs agree exactly
_MARGIN = 10  # times the distance between undisturbed runs
_COMPARABLE = 0.1  # of a step; undisturbed runs that are farther apart cannot be compared
_BESIDE = 2  # steps
_GREATEST = 0.2  # of a step, the greatest tolerance
_ALIKE = 1e-6  # relative difference of learning rates


@dataclass
class Stretch:
    """Steps of the undisturbed run that a run has made one after the other, counted from 1.

    Attributes:
        first: The first one.
        last: The last one.
    """

    first: int
    last: int


@dataclass
class Alignment:
    """How a run's steps follow those of the undisturbed run.

    Attributes:
        stretches: The steps that are equal.
        first_difference: How the first unequal step differs, "" if all are equal.
    """

    stretches: list[Stretch]
    first_difference: str


class Reference:
    """The steps of an undisturbed run, and how far others that were not disturbed are from them.

    Args:
        run: The undisturbed run.

    Attributes:
        length: The number of steps.
        distance: The greatest between undisturbed runs that can be compared.
    """

    def __init__(self, run: Run) -> None:
        self._undisturbed = run
        self._weights = [np.array(step["weights"]) for step in run.steps]
        self._optimizers = [step["optimizer"] for step in run.steps]
        self._sizes = self._measure_steps()
        self._inputs: list[int | None] = list(run.inputs)
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
        greatest = max(self._distance(other, number, number) for number in range(self.length))
        if greatest > _COMPARABLE:
            return f"weights up to {greatest:.2g} of a step apart"
        self.distance = max(self.distance, greatest)
        for number, total in enumerate(other.inputs):
            if total != self._inputs[number]:  # random augmentation, or noise
                self._inputs[number] = None
        return ""

    def follow(self, run: Run, made: int = 0) -> Alignment:
        """Find the steps of a run among those of the undisturbed run, the first one near the last that was made."""
        alignment = Alignment([], "")
        position = made - 1
        for number in range(len(run.steps)):
            expected = position + 1
            if alignment.stretches and self._distance(run, number, expected) <= self.tolerance:
                alignment.stretches[-1].last += 1
            else:
                expected = self._find(run, number, position + 1)
                if not self._distance(run, number, expected) <= self.tolerance:
                    meant = position + 1 if alignment.stretches else self._likely(run, number)
                    alignment.first_difference = self._explain(run, number, meant)
                    return alignment
                alignment.stretches.append(Stretch(expected + 1, expected + 1))
            position = expected
        return alignment

    def _measure_steps(self) -> list[float]:
        """Measure how far each optimizer's step moves its weights: the median of its steps."""
        moved: dict[str, list[float]] = {}
        before: dict[str, npt.NDArray[np.float64]] = {}
        for optimizer, weights in zip(self._optimizers, self._weights, strict=True):
            if optimizer in before and before[optimizer].shape == weights.shape:
                moved.setdefault(optimizer, []).append(float(np.linalg.norm(weights - before[optimizer])))
            before[optimizer] = weights
        smallest = float(np.finfo(np.float64).tiny)
        sizes = {optimizer: max(float(np.median(lengths)), smallest) for optimizer, lengths in moved.items()}
        return [sizes.get(optimizer, 1.0) for optimizer in self._optimizers]

    def _distance(self, run: Run, number: int, position: int) -> float:
        """Return the distance of a run's step from one of the undisturbed run."""
        if position >= self.length:
            return float("inf")
        step = run.steps[number]
        weights = np.array(step["weights"])
        if step["optimizer"] != self._optimizers[position] or weights.shape != self._weights[position].shape:
            return float("inf")
        distance = float(np.linalg.norm(weights - self._weights[position]))
        return distance / self._sizes[position]

    def _find(self, run: Run, number: int, expected: int) -> int:
        """Find the equal step that is nearest to the expected one; the most similar step if none is equal."""
        distances = [self._distance(run, number, position) for position in range(self.length)]
        equal = [position for position, distance in enumerate(distances) if distance <= self.tolerance]
        if equal:
            return min(equal, key=lambda position: abs(position - expected))
        return distances.index(min(distances))

    def _likely(self, run: Run, number: int) -> int:
        """Find the step that a run's first one was to be: the nearest, or one beside it with the same samples."""
        nearest = self._find(run, number, 0)
        beside = range(max(0, nearest - _BESIDE), min(self.length, nearest + _BESIDE + 1))
        seen = run.inputs[number]
        alike = [position for position in beside if seen is not None and seen == self._inputs[position]]
        return min(alike, key=lambda position: self._distance(run, number, position), default=nearest)

    def _has_other_inputs(self, run: Run, number: int, position: int) -> bool:
        seen, expected = run.inputs[number], self._inputs[position]
        return seen is not None and expected is not None and seen != expected

    def _explain(self, run: Run, number: int, position: int) -> str:
        """Say what is different in a step."""
        if position >= self.length:
            return f"it went on after step {self.length}, the last of the undisturbed run"
        distance = self._distance(run, number, position)
        text = f"step {position + 1} is {distance:.2g} of a step away from the undisturbed run's"
        if self._has_other_inputs(run, number, position):
            doubt = "" if number else " (if no other forward pass was made before it)"
            return f"{text}: other samples{doubt}"
        rates, expected = run.steps[number]["rates"], self._undisturbed.steps[position]["rates"]
        if not _are_alike(rates, expected):
            return f"{text}: learning rate {rates}, not {expected}"
        if self._inputs[position] is None:
            return text
        return f"{text}, with the same samples and learning rate: weights, optimizer state or random numbers"


def _are_alike(rates: Sequence[float], others: Sequence[float]) -> bool:
    if len(rates) != len(others):
        return False
    return bool(np.allclose(rates, others, rtol=_ALIKE))
