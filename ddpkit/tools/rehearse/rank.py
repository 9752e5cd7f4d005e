"""Be one rank of a rehearsal: run the script, tell its steps, and disturb it at the moment that was drawn."""

from __future__ import annotations

import atexit
import functools
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..ranks import Script, describe, run_script, use_gloo_without_gpus
from ..recorder import Record, Recorder, before, content, parameters_of, whole

# Draw the disturbances of a trial from its seed.

KINDS = {  # and what is said of it
    "kill": "rank {rank} was killed",
    "kill-all": "all ranks were killed",
    "terminate": "rank {rank} got SIGTERM",
    "terminate-all": "all ranks got SIGTERM",
}
_TWICE = 0.3  # share of the trials that are disturbed a second time
_LATE = 0.5  # share of the disturbances that come some time after an event, not at it
_LONGEST = 5.0  # seconds

RankEvents = dict[int, list[Record]]  # of an undisturbed run, by rank


@dataclass(frozen=True)
class Disturbance:
    """What happens to the ranks, and when.

    Attributes:
        kind: One of `KINDS`.
        rank: The rank to which it happens, or by which it is timed.
        event: The number of that rank's event at which it happens: its start, a step, or a change of a file.
        delay: Seconds between the event and the disturbance.
    """

    kind: str
    rank: int
    event: int
    delay: float


@dataclass(frozen=True)
class Start:
    """One start of the script.

    Attributes:
        ranks: How many.
        disturbance: What happens meanwhile; None for nothing.
    """

    ranks: int
    disturbance: Disturbance | None


def plan_trial(seed: int, number: int, kinds: Sequence[str], undisturbed: dict[int, RankEvents]) -> list[Start]:
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
    starts: list[Start] = []
    while True:
        starts.append(Start(ranks, _draw(generator, kind, undisturbed[ranks], (turns + which + len(starts)) % 2 == 0)))
        if others := [number for number in undisturbed if number != ranks]:
            ranks = generator.choice(others)
        if len(starts) > 1 or generator.random() >= _TWICE:
            return [*starts, Start(ranks, None)]
        kind = generator.choice(kinds)


def _draw(generator: random.Random, kind: str, events: RankEvents, at_change: bool) -> Disturbance:
    """Draw a moment of an undisturbed run: one at which a file is about to be changed, or else far from these.

    Far from them is a step that no change follows, as one does at the end of an epoch: later in the run than the first
    change, for before there is nothing to resume from.
    """
    moments = []
    for rank, records in events.items():
        moments += [(rank, number) for number in range(len(records) - 1)]  # the last is the end
    changes = [moment for moment in moments if _is_change(events, *moment)]
    first = min((events[rank][number]["time"] for rank, number in changes), default=0.0)
    late = [(rank, number) for rank, number in moments if events[rank][number]["time"] > first]
    between = [(r, n) for r, n in late if not _is_change(events, r, n) and not _is_change(events, r, n + 1)]
    rank, number = generator.choice((changes if at_change else between) or moments)
    delay = 0.0
    if generator.random() < _LATE:
        gap = events[rank][number + 1]["time"] - events[rank][number]["time"]
        delay = generator.uniform(0, min(gap, _LONGEST))
    return Disturbance(kind, rank, number, delay)


def _is_change(events: RankEvents, rank: int, number: int) -> bool:
    return events[rank][number]["what"] not in ("start", "step", "end")


_ELEMENTS = 256  # of all weights of an optimizer that are recorded after a step, and at least one of each tensor
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate")
_KILLED = 60.0  # seconds in which a process is killed by its parent


def be_rank(
    script: Script, folder: Path, is_inside: bool, disturbance: Disturbance | None, recorder: Recorder, control: int
) -> int:
    """Run the script as the main program of this process, to its end.

    Args:
        script: The script.
        folder: The folder in which it saves.
        is_inside: Whether it runs in that folder.
        disturbance: What will happen to the ranks; None for nothing.
        recorder: Tells what the script does.
        control: Not read.

    Returns:
        The exit code.
    """
    if is_inside:
        os.chdir(folder)
    use_gloo_without_gpus()
    events = Events(recorder, disturbance)
    Changes(events, folder).install()
    observe_steps(recorder, events)
    events.note("start")
    code, failure = run_script(script)
    _leave()
    events.note("end")
    recorder.tell("end", error=describe(failure))
    return code


def _leave() -> None:
    """Do what Python does at the end of a program: wait for threads, call what is registered, flush."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()


class Events:
    """Counts this rank's events, tells them, and lets the disturbance happen at its own.

    Args:
        recorder: Tells them.
        disturbance: What happens to the ranks; None for nothing.
    """

    def __init__(self, recorder: Recorder, disturbance: Disturbance | None) -> None:
        self._recorder = recorder
        self._disturbance = None
        if disturbance is not None and disturbance.rank == int(os.environ["RANK"]):
            self._disturbance = disturbance
        self._number = 0

    def note(self, what: str) -> None:
        """Count an event, in this process and not in those that it has forked."""
        if not self._recorder.is_main:
            return
        self._recorder.tell("event", what=what, time=time.monotonic())
        number = self._number
        self._number += 1
        disturbance = self._disturbance
        if disturbance is None or disturbance.event != number:
            return
        if not disturbance.delay:
            self._disturb(disturbance.kind, what)
            return
        timer = threading.Timer(disturbance.delay, self._disturb, [disturbance.kind, what])
        timer.daemon = True
        timer.start()

    def _disturb(self, kind: str, what: str) -> None:
        """Send this process its signal; the parent sends those to all ranks."""
        self._recorder.tell("disturbed", what=what)
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind == "terminate":
            os.kill(os.getpid(), signal.SIGTERM)
        elif kind == "kill-all":
            time.sleep(_KILLED)


class Changes:
    """Notes when files in a folder are about to be changed by Python or `torch.save`.

    Args:
        events: Counts these moments.
        folder: The folder.
    """

    def __init__(self, events: Events, folder: Path) -> None:
        self._events = events
        self._folder = f"{folder}{os.sep}"

    def install(self) -> None:
        """Begin."""
        sys.addaudithook(self._audit)
        torch.save = self._noting(torch.save)

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if event in _CHANGES:
            self._note(event.removeprefix("os."), args[0])
        elif event == "open":
            path, mode, flags = args
            writes = any(letter in mode for letter in "wax+") if mode else (flags or 0) & _WRITING
            if writes:
                self._note("write", path)

    def _note(self, verb: str, path: Any) -> None:
        full = os.path.abspath(os.fsdecode(path)) if isinstance(path, str | bytes | os.PathLike) else ""
        if full.startswith(self._folder):
            self._events.note(f"{verb} {full.removeprefix(self._folder)}")

    def _noting(self, save: Callable[..., None]) -> Callable[..., None]:
        """Let `torch.save` note that it writes, for it opens files without Python."""

        @functools.wraps(save)
        def call(content: Any, file: Any, *args: Any, **kwargs: Any) -> None:
            self._note("write", file)
            save(content, file, *args, **kwargs)

        return call


def observe_steps(recorder: Recorder, events: Events) -> None:
    """Tell of each step of an optimizer some elements of the weights before and after it, and its first inputs."""
    inputs: list[int] = []  # since the last step
    before_step: dict[int, list[float]] = {}  # by optimizer: one may call others in its step

    def given(module: Any, *args: Any, **kwargs: Any) -> None:
        if torch.is_grad_enabled() and not inputs and recorder.is_main:
            inputs.append(content([args, kwargs]))

    @torch.no_grad()
    def begins(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        before_step[id(optimizer)] = _some_elements(optimizer)

    @torch.no_grad()
    def stepped(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not recorder.is_main:
            return
        recorder.tell(
            "step",
            optimizer=_describe(optimizer),
            before=before_step[id(optimizer)],
            weights=_some_elements(optimizer),
            inputs=sum(inputs),
            rank=int(os.environ["RANK"]),
            rates=[float(group["lr"]) for group in optimizer.param_groups if "lr" in group],
        )
        inputs.clear()
        events.note("step")

    before(DistributedDataParallel, "forward", given)  # with arguments by name
    register_module_forward_pre_hook(given)
    register_optimizer_step_pre_hook(begins)
    register_optimizer_step_post_hook(stepped)


def _describe(optimizer: Optimizer) -> str:
    """Describe an optimizer by its class and the size of its weights, which a script that starts again makes alike."""
    tensors = parameters_of(optimizer)
    return f"{type(optimizer).__name__} {len(tensors)} {sum(tensor.numel() for tensor in tensors)}"


def _some_elements(optimizer: Optimizer) -> list[float]:
    """Return elements from everywhere in an optimizer's weights; parts of a flat parameter of FSDP are left out."""
    tensors = parameters_of(optimizer)
    each = max(1, _ELEMENTS // max(1, len(tensors)))
    elements: list[float] = []
    for tensor in tensors:
        plain = tensor.full_tensor() if isinstance(tensor, DTensor) else whole(tensor)
        if plain is None:
            continue
        flat = plain.reshape(-1)
        stride = max(1, flat.numel() // each)
        elements += flat[::stride][:each].to("cpu", torch.float64).tolist()
    return elements
