"""Observe losses: over how many samples each is a mean, and with which weight it enters the gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.optim import lr_scheduler

from ...script.recorder import Recorder
from ..places import Place, Stack, stack
from .expressions import divides_by_ranks, dividing_lines, lines_divided_by_ranks
from .modules import Modules
from .patching import Function, before, guarded, replace

_LOSSES = (
    "cross_entropy",
    "nll_loss",
    "mse_loss",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
)
_MANY_LOSSES = 64  # losses that are kept for a step
_IMAGES = 4  # dimensions of classes by pixel, of which each rank ignores a few: their means count as equals everywhere


class Losses:
    """Observes loss functions and `backward` from the moment of `install`."""

    def __init__(self, recorder: Recorder, modules: Modules) -> None:
        self._recorder = recorder
        self._modules = modules
        self._found: list[dict[str, Any]] = []
        self._backwards = 0
        self._depth = 0
        self.on_backward: list[Function] = []
        self.places: Stack = []
        self.divides = False
        self.divided: list[Place] = []
        self.by_ranks: list[Place] = []

    def install(self) -> None:
        """Begin."""
        for name in _LOSSES:
            replace(functional, name, self._observed)
        before(Tensor, "backward", self._begin_backward)
        before(torch.autograd, "backward", self._begin_backward)

    def begin_step(self) -> None:
        """Forget what belongs to the step that has ended."""
        self._found = []
        self._backwards = 0

    def of_this_step(self) -> list[dict[str, Any]]:
        """List the losses that were differentiated in this step."""
        return [loss for loss in self._found if "backward" in loss]

    def _begin_backward(self, *args: Any, **kwargs: Any) -> None:
        self._backwards += 1
        for look in self.on_backward:
            look()
        if self._modules.will_synchronise():
            self._recorder.tell_collective({"group": "0", "op": "backward of DDP", "where": stack()[:4]})
        self.places = stack()[:4]
        self.divides = divides_by_ranks(4)
        self.divided = dividing_lines()
        self.by_ranks = lines_divided_by_ranks()

    def _observed(self, original: Function) -> Function:
        watch = guarded(self._watch)

        def call(input: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            try:
                result = original(input, target, *args, **kwargs)
            finally:
                self._depth -= 1
            is_whole = self._depth == 0 and isinstance(result, Tensor)
            if is_whole and result.requires_grad and len(self._found) < _MANY_LOSSES:
                watch(result, original.__name__, input, target, kwargs)
            return result

        return call

    def _watch(self, result: Tensor, name: str, input: Tensor, target: Tensor, kwargs: dict[str, Any]) -> None:
        reduction = kwargs.get("reduction", "mean")
        count = _count(name, input, target, kwargs)
        loss: dict[str, Any] = {"where": stack()[:3], "count": count, "total": 0.0, "summed": reduction != "mean"}
        ignores = not target.is_floating_point() and count < target.numel()
        loss["masked"] = reduction != "mean" or (ignores and input.ndim < _IMAGES)
        self._found.append(loss)

        def arrived(gradient: Tensor) -> None:
            share = float(gradient.sum())
            if reduction == "sum":
                share *= loss["count"]
            elif reduction == "none":
                loss["count"] = int(gradient.count_nonzero())
            loss["total"] += share
            loss["backward"] = self._backwards

        result.register_hook(guarded(arrived))  # type: ignore[no-untyped-call]


def _count(name: str, input: Tensor, target: Tensor, kwargs: dict[str, Any]) -> int:
    """Count the samples, or the tokens that count, of a mean."""
    if name in ("cross_entropy", "nll_loss") and not target.is_floating_point():
        ignored = kwargs.get("ignore_index", -100)
        return int((target != ignored).sum())
    return len(input) if input.ndim else 1


# Observe learning rate schedules: how often they step, and what they are told.

_MANY_STEPS = 256  # steps of schedules that are told


class Schedules:
    """Observes schedules from the moment of `install`."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._steps = 0

    def install(self) -> None:
        """Begin."""
        before(lr_scheduler.ReduceLROnPlateau, "step", self._plateau)
        before(lr_scheduler.LRScheduler, "step", self._step)

    def _plateau(self, schedule: Any, metrics: Any = None, *args: Any, **kwargs: Any) -> None:
        places = stack()
        if places and metrics is not None:
            self._recorder.tell("plateau", value=float(metrics), where=places)

    def _step(self, schedule: Any, *args: Any, **kwargs: Any) -> None:
        if self._steps < _MANY_STEPS and (places := stack()):
            self._steps += 1
            self._recorder.tell("schedule step", where=places[:1])
