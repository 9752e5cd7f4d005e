"""Give the ranks the gradients that one process would have, on all their samples.

`accumulate` adds up micro-batches, `global_mean` weighs uneven ranks, and `average_gradients` is
for tiny networks, several networks in one step, and methods other than `forward`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
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
from .gradient_exchange import GradientExchange, Gradients, begin_exchange
from .models import check_module, check_tensors, sharing_memory, without_dtensors, writable

Loss = TypeVar("Loss", Tensor, float)


@contextmanager
def accumulate(model: nn.Module, step: int, every: int, last: bool = False) -> Iterator[bool]:
    """Cover forward and backward of one micro-batch; gradients travel only with a step's last.

    Gradients of the micro-batches add up: divide each loss by `every`, or scale it with
    `global_mean`. A plain model needs nothing and gets nothing but the answer. With `static_graph`
    torch has to synchronise a first backward, so the first micro-batch of every step travels too.

    Args:
        model: The model that `wrap_model` returned, one that torch's `fully_shard` was applied to, or a
            module that contains such models (an `nn.ModuleList` of several).
        step: The micro-batch's number, from 0; optimiser steps complete at multiples of `every`.
        every: Micro-batches per optimiser step.
        last: True for the last micro-batch of an epoch, which completes a step that would stay
            incomplete. It must be the same on every rank.

    Yields:
        True if this micro-batch completes the step: then call `optimizer.step()`.

    Raises:
        TypeError: If the model is no module, or sharded in another way.
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
        raise ValueError(f"every counts from 1 and step from 0, got every={every}, step={step}.")
    if step % every == 0:
        check_tensors("accumulate()", without_dtensors(model.named_parameters()))
    complete = last or (step + 1) % every == 0
    with ExitStack() as stack:
        if not complete:
            for module in model.modules():
                if is_fully_sharded(module):
                    stack.enter_context(_no_gradient_sync(module))
                if not isinstance(module, DistributedDataParallel):
                    continue
                if module.static_graph and step % every == 0:
                    continue
                stack.enter_context(module.no_sync())
        yield complete


@contextmanager
def _no_gradient_sync(module: Any) -> Iterator[None]:
    """Do for a module of `fully_shard` what `no_sync` of DDP does."""
    module.set_requires_gradient_sync(False, recurse=False)
    try:
        yield
    finally:
        module.set_requires_gradient_sync(True, recurse=False)


@overload
def global_mean(loss_sum: Loss, count: SupportsFloat) -> Loss: ...
@overload
def global_mean(loss_sum: nn.Module, count: SupportsFloat) -> None: ...
@untraced
def global_mean(loss_sum: Any, count: Any) -> Any:
    """Scale a sum of losses, or its gradients, to a mean over all ranks' samples. Collective.

    DDP and `average_gradients` take the mean of the ranks' gradients, which is wrong as soon as
    ranks hold different numbers of samples (or tokens): here each sample counts the same. On one
    process it is a division by `count`.

    Args:
        loss_sum: The loss summed over this rank's samples; without samples, that of an empty batch:
            it is 0 and still has a graph for DDP to synchronise. Or the model, after `backward()`
            of such sums: then its gradients are scaled in place, which with accumulation needs no
            count in advance.
        count: Number of those samples, or their total weight; 0 is fine as long as some rank has
            samples. With accumulation: of all micro-batches of the step.

    Returns:
        `loss_sum * world size / total count`. Its mean over the ranks (`all_reduce_mean`) is the
        mean over all samples. None for a model.

    Raises:
        MismatchError: On the other ranks, if one raises an error below.
        TypeError: If the loss is sharded, or a model in another way than by DTensors.
        ValueError: If a count is negative or not finite; on every rank, if the total count is 0.

    Example:
        >>> global_mean(torch.tensor(6.0), 3)
        tensor(2.)

        On two::

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
    with raise_everywhere("global_mean()", peers):
        if isinstance(loss_sum, nn.Module):
            check_tensors("global_mean()", without_dtensors(loss_sum.named_parameters()))
        elif isinstance(loss_sum, Tensor):
            check_tensors("global_mean()", [("the loss", loss_sum)])
        if isinstance(count, Tensor | np.generic):
            count = count.item()  # a sum of float16 would overflow
        if not 0 <= count < math.inf:
            raise ValueError(f"global_mean() needs a count of at least 0, got {count}.")
    total = reduce_tree(count, "sum", None, check=True, peers=peers)
    if not 0 < total < math.inf:
        found = f"the counts add up to {total}"
        raise ValueError(f"global_mean() needs at least one sample on some rank, but {found}.")
    factor = get_data_parallel_world_size() / total
    if not isinstance(loss_sum, nn.Module):
        return loss_sum * factor
    with torch.inference_mode(False), torch.no_grad():
        _scale_gradients(loss_sum, factor)
    return None


def _scale_gradients(model: nn.Module, factor: float) -> None:
    """Multiply a model's gradients, in place where they can be written to by themselves."""
    parameters = []
    scaled: dict[int, Tensor] = {}  # by the identity of the gradient: parameters may share one
    for p in model.parameters():
        if p.grad is not None:
            parameters.append(p)
            scaled[id(p.grad)] = p.grad
    gradients = list(scaled.values())
    locals = [local_part(gradient) for gradient in gradients]
    shared = sharing_memory(locals)
    in_place = []
    for i, (gradient, local) in enumerate(zip(gradients, locals, strict=True)):
        if i in shared or not writable(local):
            # before those that it shares memory with are multiplied
            scaled[id(gradient)] = gradient * factor
        else:
            in_place.append(local)
    for gradient in in_place:
        gradient.mul_(factor)
    for p in parameters:
        p.grad = scaled[id(p.grad)]


@untraced
def average_gradients(*modules: nn.Module | Tensor) -> None:
    """Replace every gradient by its mean over the ranks, in one flat all-reduce. Collective.

    Call it between `backward()` and `optimizer.step()`, with plain models that start equal on all
    ranks (seeded alike or broadcast; `check_replicas` tells). One call takes all networks of a
    step, and whatever produced the gradients. They are replaced in place, and half-precision ones
    are added in float32. On one process it does nothing.

    Ranks compare what they pass in the same all-reduce, if the call before was for parameters of
    the same size and dtype or both were small (up to 8,000 elements); otherwise, for more than
    260,000 elements, and on accelerators, in a small one before it.

    Args:
        *modules: Modules, or single tensors such as a learned temperature. The same on every rank,
            in the same order: of two networks with equal names and shapes, such as twin critics,
            nothing tells which is which.

    Raises:
        MismatchError: If the parameters differ in number, name, shape, dtype or kind of device
            between ranks, on every rank; on the other ranks, if one raises an error below. No
            gradient has changed then.
        TypeError: If a parameter is sharded, or a gradient is sparse or on another device than its
            parameter.
        ValueError: If a parameter is lazy and not initialised yet, or on the meta device.

    Note:
        A parameter without gradient on some ranks counts there as zero and gets the mean; without
        any, it stays None. A gradient that cannot be written to, such as an expanded one, is
        replaced by a new tensor.

    Example:
        >>> net = nn.Linear(2, 1)
        >>> net(torch.ones(1, 2)).sum().backward()
        >>> average_gradients(net)

        On two::

            average_gradients(actor, critic)    # rank 0, a gradient of 1.0
            average_gradients(actor, critic)    # rank 1, a gradient of 3.0; both have 2.0
    """
    gradients, exchange = begin_exchange("average_gradients()", modules)
    if exchange:
        exchange.finish()
        gradients.give_back()


@contextmanager
def averaging(*modules: nn.Module | Tensor) -> Iterator[None]:
    """Average gradients as `average_gradients` does, while a block does other work. Collective.

    The block may draw the next batch, or play on: whatever needs neither the gradients nor the
    weights after this step. Within it the parameters have no gradients, after it their means; after
    an exception they have none. On one process they come back as they were.

    Args:
        *modules: As for `average_gradients`, and with the same errors.

    Raises:
        RuntimeError: At the end, if the block has put gradients where the means belong.

    Example:
        >>> net = nn.Linear(2, 1)
        >>> net(torch.ones(1, 2)).sum().backward()
        >>> with averaging(net):
        ...     batch = torch.ones(1, 2)  # whatever comes next
    """
    gradients, exchange = begin_exchange("averaging()", modules)
    gradients.hide()
    yield
    _end(gradients, exchange)


@untraced
def _end(gradients: Gradients, exchange: GradientExchange | None) -> None:
    """Put the means in the place of the gradients."""
    if any(p.grad is not None for p in gradients.parameters):
        gradients.hide()
        raise RuntimeError(
            "Gradients were computed while those before them were still being averaged: "
            "leave the block of averaging() and step before the next backward()."
        )
    if exchange:
        exchange.finish()
    gradients.give_back()
