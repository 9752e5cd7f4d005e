"""Observe learning rate schedules: how long they are, how often they step, and what they are told."""

from __future__ import annotations

import functools
import math
import sys
from typing import Any

from torch.optim import lr_scheduler

from ...script.recorder import Recorder
from ..places import Place, calls_with, stack
from .patching import after, before

_HORIZONS = ("T_max", "total_steps", "total_iters")
_MANY = 256  # steps of schedules that are told


class Schedules:
    """Observes schedules from the moment of `install`."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._steps = 0

    def install(self) -> None:
        """Begin."""
        before(lr_scheduler.ReduceLROnPlateau, "step", self._plateau)
        for name in dir(lr_scheduler):
            schedule = getattr(lr_scheduler, name)
            is_class = isinstance(schedule, type) and issubclass(schedule, lr_scheduler.LRScheduler)
            if is_class and "__init__" in vars(schedule) and schedule is not lr_scheduler.LRScheduler:
                after(schedule, "__init__", self._made)
                before(schedule, "step", self._step)

    def _plateau(self, schedule: Any, metrics: Any = None, *args: Any, **kwargs: Any) -> None:
        places = stack()
        if places and metrics is not None:
            self._recorder.tell("plateau", value=float(metrics), where=places)

    def _made(self, _: None, made: Any, *args: Any, **kwargs: Any) -> None:
        length = _length_of(made)
        places = stack()
        if length and places:
            prepared: list[Place] = calls_with("prepare", "sched") if "accelerate" in sys.modules else []
            self._recorder.tell("schedule", name=type(made).__name__, length=length, where=places, prepared=prepared)

    def _step(self, schedule: Any, *args: Any, **kwargs: Any) -> None:
        if self._steps < _MANY and (places := stack()):
            self._steps += 1
            self._recorder.tell("schedule step", where=places[:1], name=type(schedule).__name__)


def _length_of(schedule: Any) -> int:
    """Return after how many steps a schedule is meant to end, 0 if that is not known."""
    if getattr(schedule, "end_factor", 0.0) >= getattr(schedule, "start_factor", 1.0) or hasattr(schedule, "factor"):
        return 0  # a warm-up, or a rate that is constant for a while
    for name in _HORIZONS:
        value = getattr(schedule, name, None)
        if isinstance(value, int):
            return value
    found = [0]
    for function in getattr(schedule, "lr_lambdas", ()):
        found += [number for number in _numbers_in(function) if _ends_at(function, number)]
    return max(found)


def _numbers_in(function: Any) -> list[int]:
    """List the whole numbers on which a function depends."""
    numbers: list[int] = []
    while isinstance(function, functools.partial):
        numbers += [value for value in function.keywords.values() if isinstance(value, int)]
        function = function.func
    for cell in getattr(function, "__closure__", None) or ():
        if isinstance(cell.cell_contents, int):
            numbers.append(cell.cell_contents)
    return numbers


def _ends_at(function: Any, number: int) -> bool:
    """Return whether a factor comes down until a step, and no further: not if that is the end of a warm-up."""
    earlier, last = _value(function, number * 4 // 5), _value(function, number)
    after = _value(function, 2 * number)
    return last < earlier and not 0.0 <= after < last


def _value(function: Any, step: int) -> float:
    """Return a factor, not a number where there is none."""
    try:
        return float(function(step))
    except (ArithmeticError, TypeError, ValueError, LookupError):
        return math.nan
