"""Observe decisions when they are taken: between a step and the next call of a network, by a trace function."""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from ...script.recorder import Recorder
from ..places import Place, is_own, own_files, own_frames, place_of
from .expressions import decisions_around, fractions, saving_decisions

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
