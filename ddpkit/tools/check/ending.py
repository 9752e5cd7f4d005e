"""Decide when a checked process has shown enough, and let the process that started it end it."""

from __future__ import annotations

import os

from ..script.recorder import Recorder
from .observing.expressions import awaits_stop_iteration

_EPOCHS = 3  # that begin; the third is not finished
_LONGEST = 3  # all epochs have at most so many times the steps of one


class Ending:
    """Ends the script after some steps; loaders are cut short, so that what follows an epoch is seen.

    Args:
        recorder: Tells that this rank is done, and counts its steps.
        steps: Optimiser steps of an epoch; epochs of a loader end after as many.
        control: A descriptor that becomes readable when the process shall end.

    Attributes:
        was_cut: True if an epoch was cut short since the last step.
    """

    def __init__(self, recorder: Recorder, steps: int, control: int) -> None:
        self._recorder = recorder
        self._steps = steps
        self._control = control
        self._begun_at = 0
        self._epochs = 0
        self._has_loader = False
        self._backwards = 0
        self.was_cut = False
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
        self.was_cut = True
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
        self.was_cut = False

    def wait(self, reason: str) -> None:
        """Say why this process is done, and wait for the end."""
        self._recorder.tell("done", reason=reason)
        os.read(self._control, 1)
        os._exit(0)
