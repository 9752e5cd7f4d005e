"""Measure the phases of training steps, by torch's public hooks on a DDP model and on optimizers.

A step ends where an exchange of gradients does: ranks have as many of those, or they hang. When this rank's own part of
a backward is over, the engine calls back in the order in which it was asked to: first what is asked for here, at the
gradient of the model's output; then DDP, which waits for the other ranks; then what the first has asked for.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from ..job import current_job
from ..timing import BLOCKS, STEPS, Phase, SlowRank
from ..torch_internals import after_backward, forward_pre_hooks
from .models import tensors_in

_in_backward: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()


@dataclass(frozen=True)
class StepTimes:
    """How long the last training steps of this rank took: see `step_times`.

    Attributes:
        steps: Number of steps that were measured, at most 40.
        seconds: Of a step, their mean.
        phases: Seconds of a step by phase, which add up to it: "data" (waiting for the loader), "forward", "backward"
            (with the loss), "waiting" (for other ranks), "optimizer", "other".
        slow: On the main process, the rank for which the others wait; None if there is none, and on other ranks.

    Example:
        >>> times = step_times()
        >>> if times is not None:  # on several ranks, when five steps have ended
        ...     print(f"{times.phases['waiting'] / times.seconds:.0%} of a step is waiting")
    """

    steps: int
    seconds: float
    phases: dict[str, float]
    slow: SlowRank | None


def step_times() -> StepTimes | None:
    """Return how long this rank's last steps took, and on the main process which rank makes them longer.

    Steps are those of a model that `wrap_model` has put in DDP, or ended by `average_gradients`; the time for data is
    that of a loader of `make_loader`. All is measured on the CPU, without waiting for an accelerator: there only data
    and exchanges of values show what they take.

    Returns:
        None before five steps have ended, and on one process without a process group.

    Example:
        >>> step_times() is None  # on one process
        True
    """
    clock = current_job.step_clock()
    blocks = clock.window(clock.blocks, min(BLOCKS, clock.blocks))
    if not blocks:
        return None
    steps = STEPS * len(blocks)
    sums = [sum(block[phase] for block in blocks) for phase in Phase]
    phases = {phase.label: sums[phase] / steps for phase in Phase}
    return StepTimes(steps, sum(sums) / steps, phases, current_job.slow_rank())


def follow_steps(model: DistributedDataParallel) -> None:
    """Have the step clock told of a model's forwards and backwards, and of all optimizers."""
    follow_optimizers()
    model.register_forward_pre_hook(_before_forward)
    model.register_forward_hook(_after_forward)
    if _before_own_forward not in forward_pre_hooks(model.module).values():
        model.module.register_forward_pre_hook(_before_own_forward)


def follow_optimizers() -> None:
    """Have the step clock told of the steps of all optimizers, until this process leaves its job."""
    current_job.hook_once(_hook_optimizers)


def _hook_optimizers() -> list[RemovableHandle]:
    before = register_optimizer_step_pre_hook(_before_optimizer)
    after = register_optimizer_step_post_hook(_after_optimizer)
    return [before, after]


def _before_forward(_: Any, __: Any) -> None:
    """Begin to wait: DDP sends rank 0's buffers first."""
    if not torch.compiler.is_compiling():
        current_job.step_clock().begin(Phase.WAITING)


def _before_own_forward(_: Any, __: Any) -> None:
    if torch.compiler.is_compiling():
        return
    clock = current_job.step_clock()
    if clock.phase == Phase.WAITING:  # else the model, or a copy of it, is called without DDP
        clock.begin(Phase.FORWARD)


def _after_forward(model: Any, _: Any, output: Any) -> None:
    if torch.compiler.is_compiling():
        return
    clock = current_job.step_clock()
    if not torch.is_grad_enabled():
        clock.begin(Phase.OTHER)
        return
    clock.begin(Phase.BACKWARD)
    _in_backward.discard(model)  # in one that was never over
    backward = _Backward(model)
    for tensor in tensors_in(output):
        if tensor.requires_grad and not tensor.is_leaf:  # a leaf would keep the hook
            tensor.register_hook(backward.begin)  # type: ignore[no-untyped-call]


class _Backward:
    """The backward that belongs to a forward of a model, or to several of them."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self._model = weakref.ref(model)
        self._exchanges = model.require_backward_grad_sync

    def begin(self, _: Tensor) -> None:
        """Ask to be called when this rank's own part is over."""
        model = self._model()
        if model is not None and model not in _in_backward:
            _in_backward.add(model)
            after_backward(self._end_own_part)

    def _end_own_part(self) -> None:
        model = self._model()
        if model is not None:
            _in_backward.discard(model)
        clock = current_job.step_clock()
        if not self._exchanges:
            clock.begin(Phase.OTHER)
            return
        clock.begin(Phase.WAITING)
        after_backward(self._end_wait)

    def _end_wait(self) -> None:
        clock = current_job.step_clock()
        clock.begin(Phase.OTHER)
        clock.end_step()


def _before_optimizer(*_: Any) -> None:
    if not torch.compiler.is_compiling():
        current_job.step_clock().begin(Phase.OPTIMIZER)


def _after_optimizer(*_: Any) -> None:
    if not torch.compiler.is_compiling():
        current_job.step_clock().begin(Phase.OTHER)
