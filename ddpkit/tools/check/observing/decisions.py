"""Observe decisions when they are taken: between a step and the next call of a network, by a trace function."""

from __future__ import annotations

import ast
import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from ...script.recorder import Recorder
from ..places import Place, is_own, own_files, own_frames, place_of
from .expressions import awaits_stop_iteration, decisions_around, fractions, saving_decisions

_MANY = 32  # times that a decision is told
_Table = dict[int, ast.If]  # by line


class Decisions:
    """Tells the numbers that an `if` compares, when the script comes to it.

    Looked at are those which end a loop around a step or save in it, and those which save anywhere else.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._around: dict[str, _Table] = {}
        self._taken: Counter[Place] = Counter()
        self._is_tracing = False

    def begin(self) -> None:
        """Look from the end of a step on, unless somebody else traces."""
        frames = list(own_frames(sys._getframe(1)))
        for frame in frames:
            table = self._around.setdefault(frame.f_code.co_filename, {})
            table.update({d.lineno: d for d in decisions_around(frame.f_code.co_filename, frame.f_lineno)})
        has_some = any(self._around.values()) or any(map(saving_decisions, own_files()))
        if not has_some or sys.gettrace() is not None:
            return
        self._is_tracing = True
        for frame in frames:
            frame.f_trace = self._look if self._decides(frame) else None
        sys.settrace(self._look)

    def end(self) -> None:
        """Look no more."""
        if self._is_tracing:
            sys.settrace(None)
            self._is_tracing = False
            for frame in own_frames(sys._getframe(1)):
                frame.f_trace = None

    def _decides(self, frame: FrameType) -> bool:
        file = frame.f_code.co_filename
        return is_own(file) and bool(self._around.get(file) or saving_decisions(file))

    def _look(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "call":
            return self._look if self._decides(frame) else None
        if event == "line":
            file = frame.f_code.co_filename
            statement = self._around.get(file, {}).get(frame.f_lineno) or saving_decisions(file).get(frame.f_lineno)
            if statement is not None:
                self._tell(statement, frame)
        return self._look

    def _tell(self, statement: ast.If, frame: FrameType) -> None:
        place = place_of(frame)
        self._taken[place] += 1
        values = fractions(statement.test, frame)
        if values and self._taken[place] <= _MANY:
            self._recorder.tell("decision", **place._asdict(), number=self._taken[place], values=values)


@contextmanager
def untraced() -> Iterator[None]:
    """Look at nothing in a block: a loader makes thousands of calls for a batch, and decides nothing."""
    former = sys.gettrace()
    sys.settrace(None)
    try:
        yield
    finally:
        sys.settrace(former)


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
