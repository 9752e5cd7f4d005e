"""Observe learning rate schedules: how long they are, and what they are told."""

from __future__ import annotations

from typing import Any

from torch.optim import lr_scheduler

from ..places import stack
from ..recorder import Recorder
from .patching import after, before

_HORIZONS = ("T_max", "total_steps", "total_iters")
_CLASSES = ("CosineAnnealingLR", "OneCycleLR", "LinearLR", "PolynomialLR", "ConstantLR")


class Schedules:
    """Observes schedules from the moment of `install`."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def install(self) -> None:
        """Begin."""
        before(lr_scheduler.ReduceLROnPlateau, "step", self._plateau)
        for name in _CLASSES:
            after(getattr(lr_scheduler, name), "__init__", self._made)

    def _plateau(self, schedule: Any, metrics: Any = None, *args: Any, **kwargs: Any) -> None:
        places = stack()
        if places:
            self._recorder.tell("plateau", value=float(metrics), where=places)

    def _made(self, _: None, schedule: Any, *args: Any, **kwargs: Any) -> None:
        horizon = next((getattr(schedule, n) for n in _HORIZONS if isinstance(getattr(schedule, n, None), int)), None)
        places = stack()
        if horizon and places:
            self._recorder.tell("schedule", name=type(schedule).__name__, length=horizon, where=places)
