"""Be one rank of a rehearsal: run the script, record its steps, and disturb it at the moment that was drawn."""

from __future__ import annotations

import atexit
import itertools
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..joining import join_here
from ..ranks import Script, describe, run_script
from ..recorder import Recorder, before, content, parameters_of, replace, whole

KINDS = {  # and what is said of it
    "kill": "rank {rank} was killed",
    "kill-all": "all ranks were killed",
    "terminate": "rank {rank} got SIGTERM",
    "terminate-all": "all ranks got SIGTERM",
}
Note = Callable[[str], None]  # takes what happens: a "step", "write last.pt"


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


_ELEMENTS = 256  # of all weights of an optimizer that are recorded after a step, and at least one of each tensor
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_ANEW = os.O_TRUNC | os.O_EXCL
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
        recorder: Records what the script does.
        control: Not read.

    Returns:
        The exit code.
    """
    if is_inside:
        os.chdir(folder)
    join_here()
    note = count_events(recorder, disturbance, folder)
    observe_changes(folder, note)
    observe_steps(recorder, note)
    note("start")
    code, failure = run_script(script)
    _leave()
    note("end")
    recorder.tell("end", error=describe(failure))
    return code


def _leave() -> None:
    """Do what Python does at the end of a program: wait for threads, call what is registered, flush."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()


def count_events(recorder: Recorder, disturbance: Disturbance | None, folder: Path) -> Note:
    """Return a function that records an event of this rank, and lets the disturbance happen at its own.

    Who is killed when it is about to write a file anew leaves a part of that, as if it had begun.
    """
    numbers = itertools.count()
    rank = int(os.environ["RANK"])

    def disturb(kind: str, what: str, delay: float) -> None:
        """Send this process its signal; the parent sends those to all ranks."""
        time.sleep(delay)
        verb, _, name = what.partition(" ")
        if kind.startswith("kill") and verb == "write":
            cut(folder / name, random.Random(str(disturbance)).random())
        recorder.tell("disturbed", what=what)
        if not kind.endswith("-all"):
            os.kill(os.getpid(), signal_of(kind))
        elif kind == "kill-all":
            time.sleep(_KILLED)

    def note(what: str) -> None:
        if not recorder.is_main:  # a process that the script has forked
            return
        recorder.tell("event", what=what, time=time.monotonic())
        number = next(numbers)
        if disturbance is None or (rank, number) != (disturbance.rank, disturbance.event):
            return
        details = (disturbance.kind, what, disturbance.delay)
        if disturbance.delay:
            threading.Thread(target=disturb, args=details, daemon=True).start()
        else:
            disturb(*details)

    return note


def cut(file: Path, share: float) -> None:
    """Leave a share of a file's bytes; an empty file where there is none."""
    with suppress(OSError):
        file.touch()
        os.truncate(file, int(share * file.stat().st_size))


def signal_of(kind: str) -> signal.Signals:
    """Return the signal that ranks get by a kind of disturbance."""
    return signal.SIGKILL if kind.startswith("kill") else signal.SIGTERM


def observe_changes(folder: Path, note: Note) -> None:
    """Note when files in a folder are about to be changed by Python or `torch.save`."""
    start = f"{folder}{os.sep}"

    def changes(verb: str, path: Any) -> None:
        full = os.path.abspath(os.fsdecode(path)) if isinstance(path, str | bytes | os.PathLike) else ""
        if full.startswith(start):
            note(f"{verb} {full.removeprefix(start)}")

    def audit(event: str, args: tuple[Any, ...]) -> None:
        if event in _CHANGES:
            changes(event.removeprefix("os."), args[0])
        elif event == "open":
            path, _, flags = args
            if (flags or 0) & _WRITING:
                changes("write" if flags & _ANEW else "open", path)

    def noting(save: Callable[..., None]) -> Callable[..., None]:
        def call(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
            changes("write", f)
            save(obj, f, *args, **kwargs)

        return call

    sys.addaudithook(audit)
    replace(torch, "save", noting)  # it opens files without Python


def observe_steps(recorder: Recorder, note: Note) -> None:
    """Record of each step of an optimizer some elements of the weights before and after it, and its first inputs."""
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
        note("step")

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
