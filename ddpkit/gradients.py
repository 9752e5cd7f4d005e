"""Gradients as one process would have them: over micro-batches, over uneven ranks, and where DDP does not fit.

`average_gradients` is for tiny networks, several networks in one step, and methods other than `forward`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from . import collectives, ranks, runtime
from .agreement import agree, terms

Loss = TypeVar("Loss", torch.Tensor, float)


@contextmanager
def accumulate(model: nn.Module, step: int, every: int, last: bool = False) -> Iterator[bool]:
    """Covers forward and backward of one micro-batch; gradients travel only with the one that completes a step.

    Gradients of the micro-batches add up: divide each loss by `every`, or scale it with `global_mean`. A plain model
    needs nothing and gets nothing but the answer. With `static_graph` torch has to synchronise a first backward, so the
    first micro-batch of every step travels too.

    Args:
        model: What `wrap_model` returned, or a module that contains such models (an `nn.ModuleList` of several).
        step: The micro-batch's number, from 0; optimiser steps complete at multiples of `every`.
        every: Micro-batches per optimiser step.
        last: True for the last micro-batch of an epoch, which completes a step that would stay incomplete. It must be
            the same on every rank.

    Yields:
        Whether this micro-batch completes the step: then call `optimizer.step()`.

    Example:
        >>> net, done = nn.Linear(2, 1), []
        >>> for step in range(5):
        ...     with accumulate(net, step, every=2, last=step == 4) as complete:
        ...         (net(torch.ones(3, 2)).mean() / 2).backward()
        ...     done.append(complete)  # if complete: optimizer.step(); optimizer.zero_grad()
        >>> done
        [False, True, False, True, True]
    """
    if every < 1 or step < 0:
        raise ValueError(f"every counts from 1 and step from 0, got every={every}, step={step}.")
    complete = last or (step + 1) % every == 0
    with ExitStack() as quiet:
        for module in () if complete else model.modules():
            if isinstance(module, DistributedDataParallel) and (step % every or not module.static_graph):
                quiet.enter_context(module.no_sync())
        yield complete


def global_mean(loss_sum: Loss, count: float) -> Loss:
    """Scales a sum of losses so that averaged gradients are those of the mean over all ranks' samples. Collective.

    DDP and `average_gradients` take the mean of the ranks' gradients, which is wrong as soon as ranks hold different
    numbers of samples (or tokens): here each sample counts the same. On one process it is `loss_sum / count`.

    Args:
        loss_sum: The loss summed over this rank's samples. Without samples, that of an empty batch: it is 0 and still
            has a graph for DDP to synchronise.
        count: Number of those samples, or their total weight; 0 is fine as long as some rank has samples. With
            accumulation: of all micro-batches of the step, see the example.

    Returns:
        `loss_sum * world size / total count`. Its mean over the ranks (`all_reduce_mean`) is the mean over all samples.

    Raises:
        ValueError: If the total count is not positive, on every rank.

    Example:
        >>> global_mean(torch.tensor(6.0), 3)
        tensor(2.)

        On two::

            global_mean(torch.tensor(6.0), 3)    # rank 0, three samples: 6 * 2 / 4 = 3
            global_mean(torch.tensor(1.0), 1)    # rank 1, one: 1 * 2 / 4 = 0.5; the mean of both is 7 / 4

        With accumulation, one exchange per step::

            share = global_mean(1.0, sum(len(x) for x, _ in batches))
            for i, (x, y) in enumerate(batches):
                with accumulate(model, i, len(batches)):
                    (share * F.mse_loss(model(x), y, reduction="sum")).backward()
    """
    total = collectives.all_reduce(count, op="sum")
    if not total > 0:
        raise ValueError(f"global_mean() needs at least one sample on some rank, but the counts add up to {total}.")
    share: float = ranks.get_world_size() / total
    return loss_sum * share


def average_gradients(*modules: nn.Module | torch.Tensor) -> None:
    """Replaces every `.grad` by its mean over the ranks, in place, in one flat all-reduce. Collective.

    Call it between `backward()` and `optimizer.step()`, with plain models that start equal on all ranks (seeded alike
    or broadcast; `check_replicas` tells). One call takes all networks of a step, and whatever produced the gradients.
    Half-precision gradients are added in float32. On one process it does nothing.

    Args:
        *modules: Modules, or single tensors such as a learned temperature. The same on every rank, in the same order.
            A list is compared with the other ranks' when it is first used; later calls trust it.

    Raises:
        MismatchError: If the parameters differ in number, shape or dtype between ranks, on every rank.

    Note:
        A parameter without gradient on some ranks counts there as zero and gets the mean; without any, it stays None.

    Example:
        >>> net = nn.Linear(2, 1)
        >>> net(torch.ones(1, 2)).sum().backward()
        >>> average_gradients(net)

        On two::

            average_gradients(actor, critic)    # rank 0, a gradient of 1.0
            average_gradients(actor, critic)    # rank 1, a gradient of 3.0; both have 2.0
    """
    if not runtime.joined():
        return
    held = _gradients_of(modules)
    _finish(_begin(held), held)


@contextmanager
def averaging(*modules: nn.Module | torch.Tensor) -> Iterator[None]:
    """`average_gradients`, with the work of the block done while the gradients travel. Collective.

    The block may draw the next batch, or play on: whatever needs neither the gradients nor the weights after this
    step. Within it the parameters have no gradients, after it their means; after an exception they have none. On one
    process they come back as they were.

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
    held = _gradients_of(modules)
    exchanges = _begin(held) if runtime.joined() else []
    for p in held:
        p.grad = None  # so that nothing can step with what is one rank's only
    yield
    if any(p.grad is not None for p in held):
        for p in held:
            p.grad = None
        raise RuntimeError(
            "Gradients were computed while those before them were still being averaged: "
            "leave the block of averaging() and step before the next backward()."
        )
    _finish(exchanges, held)


Gradients = dict[torch.Tensor, torch.Tensor | None]  # by parameter


def _gradients_of(modules: tuple[nn.Module | torch.Tensor, ...]) -> Gradients:
    found = (module.parameters() if isinstance(module, nn.Module) else (module,) for module in modules)
    return {p: p.grad for group in found for p in group if p.requires_grad}


def _begin(held: Gradients) -> list[_Exchange]:
    _agree_once(tuple((p.dtype, p.shape) for p in held))
    buckets: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for p in held:
        buckets.setdefault((p.device, torch.promote_types(p.dtype, torch.float32)), []).append(p)
    return [_Exchange(held, bucket, dtype) for (_, dtype), bucket in buckets.items()]


def _finish(exchanges: list[_Exchange], held: Gradients) -> None:
    for exchange in exchanges:
        exchange.finish(held)
    for p, gradient in held.items():
        p.grad = gradient


@functools.cache  # what all ranks agreed on need not be compared again
def _agree_once(layout: tuple[tuple[torch.dtype, torch.Size], ...]) -> None:
    kinds = {f"parameter {i}": f"{dtype}{list(shape)}" for i, (dtype, shape) in enumerate(layout)}
    agree(terms("average_gradients", kinds))


class _Exchange:
    """The gradients of some parameters, which are on one device, on their way in one flat tensor."""

    @torch.no_grad()
    def __init__(self, held: Gradients, parameters: list[torch.Tensor], dtype: torch.dtype) -> None:
        self.parameters = parameters
        self.missing = [i for i, p in enumerate(parameters) if held[p] is None]
        present = torch.ones(len(parameters), device=parameters[0].device, dtype=dtype)
        if self.missing:
            present[self.missing] = 0
        gradients = [torch.zeros_like(p) if (gradient := held[p]) is None else gradient for p in parameters]
        self.flat = torch.cat([*(gradient.reshape(-1).to(dtype) for gradient in gradients), present])
        with runtime.peer_errors():
            self.work = dist.all_reduce(self.flat, async_op=True)

    @torch.no_grad()
    def finish(self, held: Gradients) -> None:
        with runtime.peer_errors():
            self.work.wait()
        self.flat.div_(ranks.get_world_size())
        *means, present = torch.split(self.flat, [*(p.numel() for p in self.parameters), len(self.parameters)])
        somewhere = present.tolist() if self.missing else ()  # else there is no reason to wait for the accelerator
        for i in self.missing:
            held[self.parameters[i]] = torch.empty_like(self.parameters[i]) if somewhere[i] else None
        for p, mean in zip(self.parameters, means, strict=True):
            gradient = held[p]
            if gradient is not None:
                gradient.copy_(mean.view(p.shape))
