"""Change a checked process: replace functions of torch, and end the process when it has shown enough."""

from __future__ import annotations

import functools
import os
import traceback
from collections.abc import Callable
from typing import Any

from ..recorder import Recorder
from .source import awaits_stop_iteration

Function = Callable[..., Any]
_failed: set[str] = set()
_recorders: list[Recorder] = []


def report_to(recorder: Recorder) -> None:
    """Choose where errors of observers are told."""
    _recorders[:] = [recorder]


def guarded(look: Function) -> Function:
    """Let an observer return None where it would fail the script; its error becomes a record, once."""

    @functools.wraps(look)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return look(*args, **kwargs)
        except Exception:
            name = look.__qualname__
            if name not in _failed and _recorders:
                _failed.add(name)
                _recorders[0].tell("observer failed", name=name, error=traceback.format_exc()[-2000:])
            return None

    return call


def replace(owner: Any, name: str, make: Callable[[Function], Function]) -> None:
    """Put a function in the place of another.

    Args:
        owner: The module or class that has it.
        name: Its name; nothing happens where there is none of that name.
        make: Makes the new function from the former one.
    """
    original = getattr(owner, name, None)
    if original is not None:
        setattr(owner, name, functools.wraps(original)(make(original)))


def before(owner: Any, name: str, look: Function) -> None:
    """Call `look` with a function's arguments before the function itself."""
    look = guarded(look)

    def make(original: Function) -> Function:
        def call(*args: Any, **kwargs: Any) -> Any:
            look(*args, **kwargs)
            return original(*args, **kwargs)

        return call

    replace(owner, name, make)


def after(owner: Any, name: str, look: Function) -> None:
    """Call `look` with a function's arguments after the function itself."""
    look = guarded(look)

    def make(original: Function) -> Function:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            look(*args, **kwargs)
            return result

        return call

    replace(owner, name, make)


_EPOCHS = 3  # that begin; the third is not finished
_LONGEST = 3  # all epochs have at most so many times the steps of one


class Ending:
    """Ends the script after some steps; loaders are cut short, so that what follows an epoch is seen.

    Args:
        recorder: Tells that this rank is done, and counts its steps.
        steps: Optimiser steps of an epoch; epochs of a loader end after as many.
        control: A descriptor that becomes readable when the process shall end.

    Attributes:
        has_loader: Whether the script trains from a loader, which can be cut short.
        accumulates: Whether there was a backward pass since the last step.
    """

    def __init__(self, recorder: Recorder, steps: int, control: int) -> None:
        self._recorder = recorder
        self._steps = steps
        self._control = control
        self._begun_at = 0
        self._epochs = 0
        self._is_uncut = False  # whether an epoch goes on that was to be cut
        self.has_loader = False
        self.accumulates = False

    def begin_epoch(self) -> None:
        """Note that a loader from which the script trains begins anew."""
        self._begun_at = self._recorder.step
        self._is_uncut = False
        self._epochs += 1

    def cut_epoch(self) -> bool:
        """Return whether a loader shall end its epoch here, for which the script must be prepared."""
        if self.accumulates or self._recorder.step - self._begun_at < self._steps:
            return False
        self._is_uncut = not awaits_stop_iteration()
        return not self._is_uncut

    def before_step(self, steps: int) -> None:
        """End this process if its optimiser has made enough steps."""
        allowed = self._steps
        if self.has_loader:  # one that fetches ahead yields one batch more after it was cut
            allowed += 1
        is_long = steps >= _LONGEST * self._steps
        if not self._is_uncut:
            is_long = is_long or steps - self._begun_at >= allowed
        if is_long or self._epochs > _EPOCHS:
            self.wait("steps")

    def wait(self, reason: str) -> None:
        """Say why this process is done, and wait for the end."""
        self._recorder.tell("done", reason=reason)
        os.read(self._control, 1)
        os._exit(0)
