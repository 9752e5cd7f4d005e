"""Run the script once on ranks of this machine, disturb it, and see how each rank ends."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from ..script.ranks import Rank, Ranks, environment
from ..script.recorder import Record
from ..script.running import Script
from .plan import Events, Start
from .rank import Setting, be_rank

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
    """

    start: Start
    steps: list[Record] = field(default_factory=list)
    inputs: list[int | None] = field(default_factory=list)
    events: Events = field(default_factory=dict)
    disturbed: str = ""
    is_disturbed: bool = False
    ends: dict[int, str] = field(default_factory=dict)
    failed: list[int] = field(default_factory=list)
    waited: float = 0.0
    hanging: list[str] = field(default_factory=list)
    output: list[str] = field(default_factory=list)


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
    body = partial(be_rank, Setting(script, folder, is_inside, start.disturbance))
    environments = {rank: environment(rank, start.ranks, device) for rank in range(start.ranks)}
    with Ranks(body, environments, serves=True) as ranks:
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
