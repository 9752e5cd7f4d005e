"""Be one rank of a checked script: install the observers, run the script, and report its end."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist

from ..ranks import Script, describe, run_script, use_gloo_without_gpus
from ..recorder import Recorder
from .observing.collectives import Collectives, Files
from .observing.modules import Modules
from .observing.process import Ending, before, report_to
from .observing.random_numbers import Windows
from .observing.samples import Samples
from .observing.steps import Losses, Schedules, Steps


def be_rank(script: Script, steps: int, recorder: Recorder, control: int) -> int:
    """Run the script as the main program of this process, and wait for the end.

    Args:
        script: The script.
        steps: The optimiser steps of an epoch.
        recorder: Tells what is observed.
        control: The descriptor that becomes readable when the process shall end.
    """
    ending = Ending(recorder, steps, control)
    observe(recorder, ending)
    code, failure = run_script(script)
    recorder.tell("end", code=code, error=describe(failure))
    sys.stdout.flush()
    sys.stderr.flush()
    ending.wait("end")
    return 0


def observe(recorder: Recorder, ending: Ending) -> None:
    """Install all observers."""
    report_to(recorder)
    modules = Modules(recorder)
    windows = Windows(recorder)
    samples = Samples(recorder, ending, windows, modules)
    losses = Losses(modules, samples, ending)
    collectives = Collectives(recorder, modules)
    steps = Steps(recorder, ending, modules, losses, windows, collectives, samples)
    others = (collectives, Files(recorder), Schedules(recorder))
    for observer in (modules, losses, windows, samples, steps, *others):
        observer.install()

    def join(*args: Any, **kwargs: Any) -> None:
        if not recorder.is_main:  # a process that the script has forked to be a rank
            recorder.tell("spawns")

    def spawn(*args: Any, **kwargs: Any) -> None:
        recorder.tell("spawns")
        ending.wait("spawns")

    before(dist, "init_process_group", join)
    use_gloo_without_gpus()
    before(torch.multiprocessing, "spawn", spawn)
