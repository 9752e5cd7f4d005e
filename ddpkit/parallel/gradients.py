"""Compute the gradients of one process on all ranks' samples, with micro-batches and uneven batches."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import compress
from typing import Any, SupportsFloat, TypeVar, overload

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..collectives.consistency import raise_everywhere
from ..collectives.reduce import reduce_tree
from ..collectives.tree import local_part
from ..job import current_job
from ..job.current_job import get_data_parallel_world_size
from ..torch_internals import is_fully_sharded, untraced
from .models import can_be_overwritten, check_module, check_tensors, without_dtensors

Loss = TypeVar("Loss", Tensor, float)


@contextmanager
def accumulate(model: nn.Module, step: int, every: int, last: bool = False) -> Iterator[bool]:
    """Wrap forward and backward of one micro-batch; only the step's last one synchronises gradients.

    Gradients of the micro-batches add up: divide each loss by `every`, or use `global_mean`. On a
    plain model it synchronises nothing. With `static_graph` torch requires that the first
    micro-batch of every step synchronises, too.

    Args:
        model: The model that `wrap_model` returned, one with torch's `fully_shard` applied, or a
            module that contains such models (an `nn.ModuleList` of several).
        step: Index of the micro-batch, from 0; optimiser steps complete at multiples of `every`.
        every: Micro-batches per optimiser step.
        last: True for the last micro-batch of an epoch, which completes an incomplete step. The same
            on every rank.

    Yields:
        True if this micro-batch completes the step: then call `optimizer.step()`.

    Raises:
        TypeError: If the model is not a module, or is sharded in another way.
        ValueError: If `every` or `step` is out of range.

    Example:
        >>> net, done = nn.Linear(2, 1), []
        >>> for step in range(5):
        ...     with accumulate(net, step, every=2, last=step == 4) as complete:
        ...         (net(torch.ones(3, 2)).mean() / 2).backward()
        ...     done.append(complete)  # if complete: optimizer.step(); optimizer.zero_grad()
        >>> done
        [False, True, False, True, True]
    """
    check_module("accumulate()", model)
    if every < 1 or step < 0:
        raise ValueError(f"every must be at least 1 and step at least 0, got every={every}, step={step}.")
    if step % every == 0:
        check_tensors("accumulate()", without_dtensors(model.named_parameters()))
    complete = last or (step + 1) % every == 0
    with ExitStack() as stack:
        modules: Iterable[Any] = () if complete else model.modules()
        for module in modules:
            if is_fully_sharded(module):  # it has no `no_sync()`
                module.set_requires_gradient_sync(False, recurse=False)
                stack.callback(module.set_requires_gradient_sync, True, recurse=False)
            if isinstance(module, DistributedDataParallel) and not (module.static_graph and step % every == 0):
                stack.enter_context(module.no_sync())
        yield complete


@overload
def global_mean(loss_sum: Loss, count: SupportsFloat, *, minimum: float = 0) -> Loss: ...
@overload
def global_mean(loss_sum: nn.Module, count: SupportsFloat, *, minimum: float = 0) -> None: ...
@untraced
def global_mean(loss_sum: Any, count: Any, *, minimum: float = 0) -> Any:
    """Scale a sum of losses, or its gradients, to the mean over all ranks' samples. Collective.

    DDP and `average_gradients` average gradients over ranks, which is wrong if the ranks' numbers
    of samples (or tokens) differ. Here each sample has the same weight. On one process it divides
    by `count`.

    Args:
        loss_sum: Loss summed over this rank's samples, without padding: `loss * loader.samples`, where
            loss is their mean. Or the model, after `backward()` of such sums: its gradients are scaled
            in place, so accumulation needs no count in advance.
        count: Number of those samples (`loader.samples`), tokens or objects, or their total weight; may
            be 0 if another rank has some. With accumulation, count all micro-batches of the step.
        minimum: Least total count to divide by, the same on every rank. `minimum=1` lets a step have none
            (no object in the images, only padding tokens), as `max(1, n)` on one process.

    Returns:
        `loss_sum * world size / max(minimum, total count)`. Its mean over ranks (`all_reduce_mean`) is the mean
        over all samples. None for a model.

    Raises:
        MismatchError: On the other ranks, if one raises an error below.
        TypeError: If the loss is sharded, or a model is sharded other than by DTensors.
        ValueError: If a count or `minimum` is negative or not finite; on every rank, if both the total
            count and `minimum` are 0.

    Example:
        >>> global_mean(torch.tensor(6.0), 3)
        tensor(2.)

        On two ranks::

            global_mean(torch.tensor(6.0), 3)    # rank 0, three samples: 6 * 2 / 4 = 3
            global_mean(torch.tensor(1.0), 1)    # rank 1, one: 1 * 2 / 4 = 0.5
                                                 # the mean of both is 7 / 4

        With accumulation, one exchange per step::

            for i, (x, y) in enumerate(batches):
                with accumulate(model, i, len(batches)):
                    F.mse_loss(model(x), y, reduction="sum").backward()
            global_mean(model, sum(len(x) for x, _ in batches))    # then optimizer.step()
    """
    peers = current_job.data_parallel()
    is_model = isinstance(loss_sum, nn.Module)
    with raise_everywhere("global_mean()", peers):
        if is_model:
            check_tensors("global_mean()", without_dtensors(loss_sum.named_parameters()))
        elif isinstance(loss_sum, Tensor):
            check_tensors("global_mean()", [("the loss", loss_sum)])
        if isinstance(count, Tensor | np.generic):
            count = count.item()  # a float16 sum would overflow
        if not 0 <= count < math.inf:
            raise ValueError(f"global_mean() needs a count of at least 0, got {count}.")
        current_job.weighting["global_mean"] = 0 if is_model else count  # 0, as it may count several batches
        if not isinstance(minimum, int | float) or not 0 <= minimum < math.inf:
            raise ValueError(f"global_mean() needs a minimum of at least 0, got {minimum!r}.")
        call = f"global_mean(minimum={minimum:g})" if minimum else "global_mean()"
    total = max(minimum, reduce_tree(count, "sum", None, check=True, peers=peers, call=call))
    if not 0 < total < math.inf:
        raise ValueError(
            f"global_mean() needs at least one sample on some rank, but the counts add up to {total}. If a step may "
            "have none (no object, only padding tokens), pass minimum=1: it then divides by max(1, count)."
        )
    factor = get_data_parallel_world_size() / total
    if not is_model:
        return loss_sum * factor
    with torch.inference_mode(False), torch.no_grad():
        _scale_gradients(loss_sum, factor)
    return None


def _scale_gradients(model: nn.Module, factor: float) -> None:
    """Multiply a model's gradients, in place where possible."""
    parameters = [p for p in model.parameters() if p.grad is not None]
    gradients = [local_part(p.grad) for p in parameters]
    fit = can_be_overwritten(gradients)
    for p, fits in zip(parameters, fit, strict=True):
        if not fits:  # before those that share its memory are multiplied
            p.grad = torch.mul(p.grad, factor)  # type: ignore[arg-type]
    for gradient in compress(gradients, fit):
        gradient.mul_(factor)
