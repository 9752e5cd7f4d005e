"""Run the script once on ranks of this machine, disturb it, and compare its steps with those of undisturbed runs."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np

from ..ranks import Ranks, Script
from ..recorder import Record
from .rank import RankEvents, Start, be_rank

_POLL = 0.05  # seconds


@dataclass
class Run:
    """How one start of the script went.

    Attributes:
        start: What was started.
        steps: The step records of the rank that made the most steps.
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
    events: RankEvents = field(default_factory=dict)
    disturbed: str = ""
    is_disturbed: bool = False
    ends: dict[int, str] = field(default_factory=dict)
    failed: list[int] = field(default_factory=list)
    waited: float = 0.0
    hanging: list[str] = field(default_factory=list)
    output: list[str] = field(default_factory=list)
    alignment: Alignment | None = None


FOLDER = "{folder}"


@dataclass(frozen=True)
class Options:
    """What to rehearse.

    Attributes:
        script: The script; `{folder}` in its arguments stands for the folder of a run.
        again: Arguments that it gets in addition when it is started again.
        ranks: The numbers of ranks; undisturbed runs on the others are compared with one on the first.
        kinds: The kinds of disturbances.
        seed: Of all trials.
        exact: Whether the tensors in files must be equal bit for bit.
        silence: Seconds without any record after which a run counts as hanging.
        grace: Seconds in which all ranks have to end once one has ended or was disturbed, before they are ended.
        device: "cpu" hides the GPUs.
    """

    script: Script
    again: list[str]
    ranks: list[int]
    kinds: list[str]
    seed: int
    exact: bool
    silence: float
    grace: float
    device: str


def run_once(options: Options, folder: Path, start: Start, is_again: bool) -> Run:
    """Run the script once, and leave no process behind.

    Args:
        options: What to rehearse.
        folder: The folder in which it saves; it runs there if its arguments do not name it.
        start: On how many ranks, and what happens to them.
        is_again: Whether it was started there before.
    """
    folder.mkdir(exist_ok=True)
    arguments = options.script.arguments
    is_inside = not any(FOLDER in argument for argument in [*arguments, *options.again])
    if is_again:
        arguments = arguments + options.again
    script = replace(options.script, arguments=[argument.replace(FOLDER, str(folder)) for argument in arguments])
    body = partial(be_rank, script, folder, is_inside, start.disturbance)
    with Ranks(body, start.ranks, options.device) as ranks:
        return _Follower(ranks, start, options).run()


class _Follower:
    """Follows the ranks to their end."""

    def __init__(self, ranks: Ranks, start: Start, options: Options) -> None:
        self._ranks = ranks
        self._options = options
        self._result = Run(start)
        self._heard = time.monotonic()  # when a rank recorded something last
        self._counted_from: float | None = None  # when the ranks began to have to end

    def run(self) -> Run:
        """Wait until all ranks have ended, or end them when their time is up."""
        while any(rank.ended is None for rank in self._ranks.all):
            for _, record in self._ranks.wait(_POLL):
                self._heard = time.monotonic()
                if record["kind"] == "disturbed":
                    self._disturb(record["what"])
            if self._is_time_up():
                self._end()
        for rank in self._ranks.all:
            rank.read()
        return self._describe()

    def _disturb(self, what: str) -> None:
        """Note that the disturbance has come, and send the signals that all ranks get."""
        run = self._result
        run.is_disturbed = True
        run.disturbed = "" if what == "step" else what
        self._counted_from = time.monotonic()
        kind = run.start.disturbance.kind if run.start.disturbance else ""
        if kind.endswith("-all"):
            number = signal.SIGKILL if kind == "kill-all" else signal.SIGTERM
            for rank in self._ranks.all:
                with suppress(ProcessLookupError):
                    os.kill(rank.pid, number)

    def _is_time_up(self) -> bool:
        now = time.monotonic()
        if self._counted_from is None and any(rank.ended is not None for rank in self._ranks.all):
            self._counted_from = now
        begun = self._counted_from
        if begun is not None and now > max(begun, self._heard) + self._options.grace:
            return True
        return now > self._heard + self._options.silence

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
            errors = [record["error"] for record in rank.records if record["kind"] == "end" and record["error"]]
            run.ends[rank.number] = ": ".join([f"{rank.ended}", *errors])
            if rank.ended != "exited with code 0":
                run.failed.append(rank.number)
                run.output = run.output or rank.tail()
        run.steps = max(steps, key=len)
        return run


# Compare the steps of a run that was disturbed with those of undisturbed runs.
#
# Distances between weights are given in steps: 1 is as far as a step of the optimizer moves them.

_TOLERANCE = 1e-3  # of a step, beyond which weights are not equal even if undisturbed runs agree exactly
_MARGIN = 10  # times the distance between undisturbed runs
_COMPARABLE = 0.1  # of a step; undisturbed runs that are farther apart cannot be compared
_GREATEST = 0.2  # of a step, the greatest tolerance
_ALIKE = 1e-6  # relative difference of learning rates


@dataclass
class Alignment:
    """How a run's steps follow those of the undisturbed run.

    Attributes:
        stretches: The first and the last of steps that it has made one after the other, counted from 1.
        first_difference: How the first unequal step differs, "" if all are equal.
    """

    stretches: list[list[int]]
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
        self._steps = run.steps
        self._weights = [np.array(step["weights"]) for step in run.steps]
        self._before = [np.array(step["before"]) for step in run.steps]
        self._inputs = {run.start.ranks: [step["inputs"] for step in run.steps]}
        self._sizes = self._measure_steps()
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
        self._inputs[other.start.ranks] = [step["inputs"] for step in other.steps]
        return ""

    def follow(self, run: Run, made: int = 0) -> Alignment:
        """Find the steps of a run among those of the undisturbed run, the first one near the last that was made."""
        alignment = Alignment([], "")
        expected = made
        for step in run.steps:
            if alignment.stretches and self._distance(step, expected) <= self.tolerance:
                alignment.stretches[-1][1] += 1
            else:
                position = self._find(step, expected)
                if not self._distance(step, position) <= self.tolerance:
                    meant = expected if alignment.stretches else position
                    alignment.first_difference = self._explain(step, meant, run.start.ranks)
                    return alignment
                alignment.stretches.append([position + 1, position + 1])
            expected = alignment.stretches[-1][1]
        return alignment

    def _measure_steps(self) -> list[float]:
        """Measure how far each optimizer's step moves its weights: the median of its steps."""
        moved: dict[str, list[float]] = {}
        for step, before, weights in zip(self._steps, self._before, self._weights, strict=True):
            moved.setdefault(step["optimizer"], []).append(float(np.linalg.norm(weights - before)))
        smallest = float(np.finfo(np.float64).tiny)
        sizes = {name: max(float(np.median(lengths)), smallest) for name, lengths in moved.items()}
        return [sizes[step["optimizer"]] for step in self._steps]

    def _distance(self, step: Record, position: int, when: str = "weights") -> float:
        """Return the distance of a step from one of the undisturbed run, after it or "before"."""
        if position >= self.length or step["optimizer"] != self._steps[position]["optimizer"]:
            return float("inf")
        meant = (self._weights if when == "weights" else self._before)[position]
        weights = np.array(step[when])
        if weights.shape != meant.shape:
            return float("inf")
        return float(np.linalg.norm(weights - meant)) / self._sizes[position]

    def _find(self, step: Record, expected: int) -> int:
        """Find the equal step nearest to the expected one; else one that begins alike; else the most similar one."""
        for when in ("weights", "before"):
            distances = [self._distance(step, position, when) for position in range(self.length)]
            equal = [position for position, distance in enumerate(distances) if distance <= self.tolerance]
            if equal:
                return min(equal, key=lambda position: abs(position - expected))
        distances = [self._distance(step, position) for position in range(self.length)]
        return distances.index(min(distances))

    def _explain(self, step: Record, position: int, ranks: int) -> str:
        """Say what is different in a step: the learning rate, the weights before it, the samples, or something else."""
        if position >= self.length:
            return f"it continued after step {self.length}, the last of the undisturbed run"
        distance = self._distance(step, position)
        text = f"step {position + 1} is {distance:.2g} of a step away from the undisturbed run's"
        rates, meant = step["rates"], self._steps[position]["rates"]
        if not _are_alike(rates, meant):
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


def _are_alike(rates: Sequence[float], others: Sequence[float]) -> bool:
    return len(rates) == len(others) and bool(np.allclose(rates, others, rtol=_ALIKE))
