"""Observe decisions when they are taken: between a step and the next call of a network, by a trace function."""

from __future__ import annotations

import ast
import os
import sys
from collections import Counter
from types import FrameType
from typing import Any

from ...script.recorder import Recorder
from ..places import Place, own_frames, place_of
from .expressions import awaits_stop_iteration, decisions_around, fractions

_MANY = 32  # times that a decision is told


class Decisions:
    """Tells the numbers that an `if` compares which ends a loop around a step, when the script comes to it."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._around: dict[str, dict[int, ast.If]] = {}  # by file and line
        self._taken: Counter[Place] = Counter()
        self._is_tracing = False

    def begin(self) -> None:
        """Look from the end of a step on, unless somebody else traces."""
        if sys.gettrace() is not None:
            return
        for frame in own_frames(sys._getframe(1)):
            table = self._around.setdefault(frame.f_code.co_filename, {})
            table |= decisions_around(frame.f_code.co_filename, frame.f_lineno)
            if table:
                frame.f_trace = self._look
                self._is_tracing = True
        if self._is_tracing:
            sys.settrace(_skip)

    def end(self) -> None:
        """Look no more."""
        if self._is_tracing:
            sys.settrace(None)
            self._is_tracing = False
            for frame in own_frames(sys._getframe(1)):
                frame.f_trace = None

    def _look(self, frame: FrameType, event: str, argument: Any) -> Any:
        statement = self._around[frame.f_code.co_filename].get(frame.f_lineno)
        if event == "line" and statement is not None:
            place = place_of(frame)
            self._taken[place] += 1
            values = fractions(statement.test, frame)
            if values and self._taken[place] <= _MANY:
                self._recorder.tell("decision", **place._asdict(), number=self._taken[place], values=values)
        return self._look


def _skip(frame: FrameType, event: str, argument: Any) -> None:
    """Look at nothing in functions that are called: these end no loop."""


# Decide when a checked process has shown enough, and let the process that started it end it.

_EPOCHS = 3  # that begin; the third is not finished
_LONGEST = 3  # all epochs have at most so many times the steps of one


class Ending:
    """Ends the script after some steps; loaders are cut short, so that what follows an epoch is seen.

    Args:
        recorder: Tells that this rank is done, and counts its steps.
        steps: Optimiser steps of an epoch; epochs of a loader end after as many.
        control: A descriptor that becomes readable when the process shall end.
    """

    def __init__(self, recorder: Recorder, steps: int, control: int) -> None:
        self._recorder = recorder
        self._steps = steps
        self._control = control
        self._begun_at = 0
        self._epochs = 0
        self._has_loader = False
        self._backwards = 0
        self._is_uncut = False  # whether an epoch goes on that was to be cut

    def note_loader(self) -> None:
        """Note that the script trains from a loader, which can be cut short."""
        self._has_loader = True

    def begin_epoch(self) -> None:
        """Note that a loader from which the script trains begins anew."""
        self._begun_at = self._recorder.step
        self._is_uncut = False
        self._epochs += 1

    def begin_backward(self) -> None:
        """Note that gradients are being accumulated."""
        self._backwards += 1

    def cut_epoch(self) -> bool:
        """Return whether a loader shall end its epoch here, for which the script must be prepared."""
        if self._backwards or self._recorder.step - self._begun_at < self._steps:
            return False
        if not awaits_stop_iteration():
            self._is_uncut = True
            return False
        return True

    def before_step(self, steps: int) -> None:
        """End this process if its optimiser has made enough steps."""
        allowed = self._steps
        if self._has_loader:  # a loader that fetches ahead yields one batch more after it was cut
            allowed += 1
        is_long = steps >= _LONGEST * self._steps
        if not self._is_uncut:
            is_long = is_long or steps - self._begun_at >= allowed
        if is_long or self._epochs > _EPOCHS:
            self.wait("steps")

    def after_step(self) -> None:
        """Note that a step has ended."""
        self._backwards = 0

    def wait(self, reason: str) -> None:
        """Say why this process is done, and wait for the end."""
        self._recorder.tell("done", reason=reason)
        os.read(self._control, 1)
        os._exit(0)
