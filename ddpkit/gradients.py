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


@torch.no_grad()
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
    found = (module.parameters() if isinstance(module, nn.Module) else (module,) for module in modules)
    parameters = [p for p in dict.fromkeys(p for group in found for p in group) if p.requires_grad]
    _agree_once(tuple((p.dtype, p.shape) for p in parameters))
    buckets: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for p in parameters:
        buckets.setdefault((p.device, torch.promote_types(p.dtype, torch.float32)), []).append(p)
    for (device, dtype), bucket in buckets.items():
        _average(bucket, device, dtype)


@functools.cache  # what all ranks agreed on need not be compared again
def _agree_once(layout: tuple[tuple[torch.dtype, torch.Size], ...]) -> None:
    kinds = {f"parameter {i}": f"{dtype}{list(shape)}" for i, (dtype, shape) in enumerate(layout)}
    agree(terms("average_gradients", kinds))


def _average(bucket: list[torch.Tensor], device: torch.device, dtype: torch.dtype) -> None:
    missing = [i for i, p in enumerate(bucket) if p.grad is None]
    present = torch.ones(len(bucket), device=device, dtype=dtype)
    if missing:
        present[missing] = 0
    gradients = [(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1).to(dtype) for p in bucket]
    flat = torch.cat([*gradients, present])
    with runtime.peer_errors():
        dist.all_reduce(flat)
    flat.div_(ranks.get_world_size())
    *means, present = torch.split(flat, [*(p.numel() for p in bucket), len(bucket)])
    somewhere = present.tolist() if missing else ()  # else there is no reason to wait for the accelerator
    for i, (p, mean) in enumerate(zip(bucket, means, strict=True)):
        if p.grad is None and somewhere[i]:
            p.grad = torch.empty_like(p)
        if p.grad is not None:
            p.grad.copy_(mean.view(p.shape))
