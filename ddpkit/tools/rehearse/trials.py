"""Run the script undisturbed and disturbed, and judge how each trial ends."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..script.running import Script
from ..terminal import count
from . import files
from .comparison import Reference, Walk
from .files import Difference
from .lives import Life, Limits, live
from .plan import Start, plan_trial

FOLDER = "{folder}"
_TOLERANCE = 1e-3  # relative difference of tensors in files, where undisturbed runs agree exactly
_MARGIN = 10  # times the difference between undisturbed runs
_REPEATED = "repeated"


class UnfitScriptError(Exception):
    """The script cannot be rehearsed."""

    def __init__(self, reason: str, output: list[str]) -> None:
        super().__init__(reason)
        self.output = output


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
        limits: How long to wait.
        device: "cpu" hides the GPUs.
    """

    script: Script
    again: list[str]
    ranks: list[int]
    kinds: list[str]
    seed: int
    exact: bool
    limits: Limits
    device: str


@dataclass
class Trial:
    """How a trial went.

    Attributes:
        number: Counted from 1.
        lives: The starts of the script.
        walks: How the steps of each follow the undisturbed run's; [] if they cannot be compared.
        difference: Of the files at the end.
        wrong: What was wrong, nothing if it ended like the undisturbed run.
        notes: What is worth knowing.
    """

    number: int
    lives: list[Life]
    walks: list[Walk]
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
        difference: The relative difference of tensors in the files of undisturbed runs.
        is_sharded: Whether the shapes of tensors in files depend on the number of ranks.
        has_own_names: Whether the names of files differ between undisturbed runs.
        length: The steps of the undisturbed run.
    """

    def __init__(self, options: Options, folder: Path, announce: Callable[[str], None]) -> None:
        self._options = options
        self._folder = folder
        self._announce = announce
        self.reference: Reference | None = None
        self.excluded: dict[int, str] = {}
        self.difference = 0.0
        self.is_sharded = False
        self.has_own_names = False
        self.length = 0
        self._undisturbed: dict[int, Life] = {}

    def run_undisturbed(self) -> None:
        """Run the script on each number of ranks, on the first one twice.

        Raises:
            UnfitScriptError: If it fails, or makes no step.
        """
        first, *others = self._options.ranks
        life = self._undisturbed[first] = self._run_whole(first, "undisturbed")
        self.length = len(life.steps)
        if self.length < 2:
            reason = "the script made less than two steps of a torch optimizer in the processes that were started"
            raise UnfitScriptError(reason, life.output)
        if not all(step["weights"] for step in life.steps):
            raise UnfitScriptError(
                "each rank holds a part of all weights, as FSDP's first version does: use fully_shard", []
            )
        self.reference = Reference(life)
        reason = self._compare(self._run_whole(first, _REPEATED), "repeated")
        if reason:
            self.excluded[first] = reason
            self.reference = None
        for ranks in others:
            reason = self._run_other(ranks, f"undisturbed-{ranks}")
            if reason:
                self.excluded[ranks] = reason

    def run_trial(self, number: int) -> Trial:
        """Run a trial: disturb the script, and start it again until it has ended undisturbed."""
        events = {ranks: life.events for ranks, life in self._undisturbed.items()}
        starts = plan_trial(self._options.seed, number, self._options.kinds, events)
        name = f"trial-{number}"
        lives: list[Life] = []
        for start in starts:
            self._announce(f"trial {number}, {count(start.ranks, 'rank')}")
            lives.append(self._run(start, name, is_again=bool(lives)))
            if self._is_complete(lives[-1]):
                break
        trial = Trial(number, lives, self._walk(lives), files.compare(self._path("undisturbed"), self._path(name)))
        self._judge_lives(trial)
        self._judge_steps(trial)
        self._judge_files(trial)
        if not trial.wrong:
            shutil.rmtree(self._path(name), ignore_errors=True)
        return trial

    def _run_whole(self, ranks: int, name: str) -> Life:
        """Run the script undisturbed, to its end."""
        self._announce(f"undisturbed, {count(ranks, 'rank')}")
        life = self._run(Start(ranks, None), name, is_again=False)
        if life.hanging:
            raise UnfitScriptError(f"the script hangs on {count(ranks, 'rank')}, undisturbed", life.hanging)
        if life.failed:
            rank = life.failed[0]
            reason = f"the script failed on {count(ranks, 'rank')}, undisturbed: rank {rank} {life.ends[rank]}"
            raise UnfitScriptError(reason, life.output)
        return life

    def _run_other(self, ranks: int, name: str) -> str:
        """Run the script undisturbed on another number of ranks; return why that is left out, "" if it is not."""
        try:
            life = self._run_whole(ranks, name)
        except UnfitScriptError as error:
            return str(error)
        reason = self._compare(life, name) if self.reference else ""
        if not reason:
            self._undisturbed[ranks] = life
        return reason

    def _run(self, start: Start, name: str, is_again: bool) -> Life:
        options = self._options
        folder = self._path(name)
        folder.mkdir(exist_ok=True)
        arguments = options.script.arguments
        is_inside = not any(FOLDER in argument for argument in [*arguments, *options.again])
        if is_again:
            arguments = arguments + options.again
        named = [argument.replace(FOLDER, str(folder)) for argument in arguments]
        script = replace(options.script, arguments=named)
        return live(script, folder, is_inside, start, options.limits, options.device)

    def _path(self, name: str) -> Path:
        return self._folder / name

    def _compare(self, life: Life, name: str) -> str:
        """Learn from another undisturbed run; return why it cannot be compared, "" if it can."""
        assert self.reference is not None
        reason = self.reference.add(life)
        if not reason:
            difference = files.compare(self._path("undisturbed"), self._path(name))
            self.difference = max(self.difference, difference.greatest)
            self.is_sharded = self.is_sharded or bool(difference.unlike)
            self.has_own_names = self.has_own_names or difference.is_missing
        return reason

    def _is_complete(self, life: Life) -> bool:
        """Return whether a start came to the end of the script, also if the others went on after one was killed."""
        if self.reference is None or any(rank not in _survived(life) for rank in life.failed):
            return False
        stretches = self.reference.follow(life).stretches
        return bool(stretches) and stretches[-1].last == self.length

    def _walk(self, lives: list[Life]) -> list[Walk]:
        walks: list[Walk] = []
        made = 0
        for life in lives if self.reference else []:
            assert self.reference is not None
            walks.append(self.reference.follow(life, made))
            made = max([made, *(stretch.last for stretch in walks[-1].stretches)])
        return walks

    def _judge_lives(self, trial: Trial) -> None:
        """Judge how the processes have ended."""
        for life in trial.lives:
            if life.hanging:
                text = f"on {count(life.start.ranks, 'rank')} some did not end within {self._options.limits.grace:g} s"
                trial.notes += [text, *life.hanging]
            was_paused = (
                life.is_disturbed and life.start.disturbance is not None and life.start.disturbance.kind == "pause"
            )
            if life.failed and (was_paused or not life.is_disturbed):
                rank = life.failed[0]
                what = "after a rank was stopped for a while" if was_paused else "started again"
                text = f"{what} on {count(life.start.ranks, 'rank')}, it failed"
                trial.wrong.append(f"{text}: rank {rank} {life.ends[rank]}")
                trial.notes += life.output
                break  # later starts fail as well

    def _judge_steps(self, trial: Trial) -> None:
        """Judge whether each step was made, and as in the undisturbed run."""
        made = 0
        for walk in trial.walks:
            for stretch in walk.stretches:
                if stretch.first > made + 1:
                    trial.wrong.append(f"steps {made + 1} to {stretch.first - 1} were never made")
                made = max(made, stretch.last)
            if walk.parted:
                trial.wrong.append(walk.parted)
                break  # later starts go on from there
        if trial.walks and not trial.wrong and made < self.length:
            trial.wrong.append(f"it ended after step {made} of {self.length}")

    def _judge_files(self, trial: Trial) -> None:
        """Judge whether the files at the end hold the same."""
        difference = trial.difference
        if trial.wrong or self.reference is None:
            return
        if self._options.exact and not difference.compared:
            trial.wrong.append("no file holds tensors that could be compared bit for bit")
        elif difference.is_missing and not self.has_own_names:
            trial.wrong.append(f"{difference.newest}, the last file of the undisturbed run, is not there")
        elif difference.unlike and not self.is_sharded:
            trial.wrong.append(f"{difference.unlike} is missing, or of another shape or type")
        elif self._options.exact and not difference.bits:
            trial.wrong.append(f"not equal bit for bit: {difference.where}")
        elif difference.greatest > max(_TOLERANCE, _MARGIN * self.difference):
            trial.wrong.append(f"{difference.where} differs by {difference.greatest:.2g} of its greatest element")


def _survived(life: Life) -> list[int]:
    """List the rank that was killed, if others made steps without it."""
    disturbance = life.start.disturbance
    if disturbance is None or disturbance.kind != "kill":
        return []
    made = sum(record["what"] == "step" for record in life.events[disturbance.rank])
    return [disturbance.rank] if made < len(life.steps) else []


def _kind(life: Life) -> str:
    """Return the kind of a start's disturbance, "" if none was planned."""
    return life.start.disturbance.kind if life.start.disturbance else ""
