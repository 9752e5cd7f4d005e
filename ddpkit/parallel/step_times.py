"""Measure the phases of training steps, by torch's public hooks on a DDP model and on optimizers.

A step ends where the next forward begins whose gradients will be exchanged. Ranks have as many of those, or they hang.
The backward's own part ends with the gradient of the model's first parameter, which is usually the last to come; what
follows until the backward returns is waiting for the other ranks.
"""

from __future__ import annotations

import functools
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..process_group import lifecycle
from ..timing.clock import STEPS, Phase
from ..timing.pace import BLOCKS, SlowRank
from ..torch_internals import after_backward, ignored_by_ddp


@dataclass(frozen=True)
class StepTimes:
    """How long the last training steps of this rank took: see `step_times`.

    Attributes:
        steps: Number of steps that were measured, at most 40.
        seconds: Of a step, their mean.
        phases: Seconds of a step by phase, which add up to it: "data" (waiting for the loader), "forward", "backward"
            (with the loss), "waiting" (for other ranks), "optimizer", "other".
        slow: On the main process, the rank for which the others wait; None if there is none, and on other ranks.
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
        None before five steps have ended, and on one process, which waits for nobody.

    Example:
        >>> step_times() is None  # on one process
        True
    """
    clock = lifecycle.step_clock()
    blocks = clock.window(clock.blocks, min(BLOCKS, clock.blocks))
    if not blocks:
        return None
    steps = STEPS * len(blocks)
    sums = [sum(block[phase] for block in blocks) for phase in Phase]
    phases = {phase.name.lower(): sums[phase] / steps for phase in Phase}
    return StepTimes(steps, sum(sums) / steps, phases, lifecycle.slow_rank())


def follow_steps(model: DistributedDataParallel) -> None:
    """Have the step clock told of a model's forwards and backwards, and of all optimizers."""
    _follow_optimizers()
    model.register_forward_pre_hook(_before_forward)
    model.register_forward_hook(_after_forward)
    ignored = ignored_by_ddp(model.module)
    for name, parameter in model.module.named_parameters():
        if parameter.requires_grad and name not in ignored:
            hook = functools.partial(_after_last_gradient, weakref.ref(model))
            parameter.register_post_accumulate_grad_hook(hook)
            return


@functools.cache
def _follow_optimizers() -> None:
    register_optimizer_step_pre_hook(_before_optimizer)
    register_optimizer_step_post_hook(_after_optimizer)


def _before_forward(model: Any, _: Any) -> None:
    if torch.compiler.is_compiling():
        return
    clock = lifecycle.step_clock()
    if model.training and torch.is_grad_enabled() and model.require_backward_grad_sync:
        clock.end_step()
    clock.begin(Phase.FORWARD)


def _after_forward(model: Any, _: Any, __: Any) -> None:
    if torch.compiler.is_compiling():
        return
    lifecycle.step_clock().begin(Phase.BACKWARD if torch.is_grad_enabled() else Phase.OTHER)


def _after_last_gradient(model: weakref.ref[DistributedDataParallel], _: Tensor) -> None:
    """Begin to wait, until the backward has returned."""
    found = model()
    if found is None:  # the parameter has been wrapped again, or is trained by itself
        return
    clock = lifecycle.step_clock()
    if not found.require_backward_grad_sync:
        clock.begin(Phase.OTHER)
        return
    clock.begin(Phase.WAITING)
    # DDP's own wait is queued after this gradient: end behind that
    after_backward(lambda: after_backward(_after_wait))


def _after_wait() -> None:
    lifecycle.step_clock().begin(Phase.OTHER)


def _before_optimizer(*_: Any) -> None:
    if not torch.compiler.is_compiling():
        lifecycle.step_clock().begin(Phase.OPTIMIZER)


def _after_optimizer(*_: Any) -> None:
    if not torch.compiler.is_compiling():
        lifecycle.step_clock().begin(Phase.OTHER)
