"""What trainers need for networks of their users: import, try and check them, and average their weights."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

import ddpkit

from .program import UserError, users_code

log = logging.getLogger("trainer")
NO_STEP = 2**62


def find_class(setting: str, name: str) -> Callable[..., Any]:
    """Import a class of the user's, "package.module:Class", also from the current folder."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    module, _, kind = name.partition(":")
    try:
        return getattr(importlib.import_module(module), kind)
    except Exception as error:  # also of the user's own code, such as a CUDA extension that cannot be loaded
        raise UserError(
            f"{setting}: cannot import {name}: {type(error).__name__}: {error}; if it is not found, start in the "
            f"folder that holds {module.partition('.')[0]}, put that folder on PYTHONPATH, or install the package"
        ) from error


def make_module(setting: str, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], remedy: str = "") -> nn.Module:
    """Make a module of the user's, first on one rank of each node, as it may download files. Collective."""
    make = find_class(setting, name)
    with ddpkit.main_process_first(local=True), users_code(f"{setting}: cannot make {name}", remedy):
        module = make(*args, **kwargs)
    if not isinstance(module, nn.Module):
        raise UserError(f"{setting}: {name} must make a torch.nn.Module, but it made a {type(module).__name__}")
    return module


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode for a block, then restore the mode of each module."""
    former = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in former.items():
            module.training = training


@contextmanager
def trying(model: nn.Module) -> Iterator[None]:
    """Call a model in evaluation in a block; afterwards its buffers are what they were, also those that it replaces."""
    held = [(module, *pair) for module in model.modules() for pair in module.named_buffers(recurse=False)]
    former = [(*place, buffer, buffer.clone()) for *place, buffer in held if not is_lazy(buffer)]
    with torch.no_grad(), evaluating(model):
        yield
        for module, name, buffer, value in former:
            module._buffers[name] = buffer.copy_(value)


def check_output(setting: str, found: object, shape: Sequence[int] | None = None, names: str = "") -> None:
    """Raise if a module of the user's returns no tensor, another shape, or in training a tensor without a gradient."""
    if not isinstance(found, Tensor):
        raise UserError(
            f"{setting}: it must return one tensor, but it returned a {type(found).__name__}: wrap it in a module "
            "that returns the tensor alone"
        )
    if not found.is_floating_point():
        raise UserError(f"{setting}: it must return floating-point numbers, but it returned {found.dtype}")
    if shape is not None and found.shape != shape:  # a loss would broadcast it silently
        raise UserError(f"{setting}: it must return {names}, here {tuple(shape)}, but it returned {tuple(found.shape)}")
    if torch.is_grad_enabled() and not found.requires_grad:
        raise UserError(
            f"{setting}: it returned a tensor that has no gradient, so it cannot be trained: look for detach(), "
            "no_grad() and operations without a derivative"
        )


def check_order(setting: str, call: Callable[[], object], shape: Sequence[int], names: str) -> None:
    """Raise if a call returns dimensions 1 and 2 of a shape exchanged; where they are equal, nothing else sees it."""
    found = None
    with suppress(Exception):  # of a network for the sizes that it is trained with
        found = call()
    if found is None and ddpkit.is_main_process():
        log.warning("%s: see that it returns %s: two of these are equal here", setting, names)
    if isinstance(found, Tensor) and found.shape == (shape[0], shape[2], shape[1], *shape[3:]):
        check_output(setting, found, shape, names)


def check_sizes(setting: str, module: nn.Module) -> None:
    """Raise if lazy parameters have no sizes yet after a call: they could be neither wrapped nor averaged."""
    lazy = [name for name, weights in module.named_parameters() if is_lazy(weights)]
    if lazy:
        raise UserError(f"{setting}: {', '.join(lazy)} got no size by a call in evaluation: give the sizes")


def without_gradient(model: nn.Module) -> list[str]:
    """List the trainable parameters without a gradient after a backward pass: DDP would wait for them."""
    return [name for name, weights in model.named_parameters() if weights.requires_grad and weights.grad is None]


def average_of(network: nn.Module, off: str) -> nn.Module:
    """Copy a network for a moving average of its weights; `off` is the setting for none.

    Tensors that are computed from weights before each call, as by `torch.nn.utils.weight_norm`, are copied as they are.
    """
    held = (value for module in network.modules() for value in vars(module).values() if isinstance(value, Tensor))
    computed = {id(value): value.detach().clone() for value in held if not value.is_leaf}
    with users_code("the network cannot be copied for a moving average", f"; to train without one, set {off}"):
        return deepcopy(network, computed).requires_grad_(False)


@torch.no_grad()
def update_average(average: nn.Module, model: nn.Module, keep: float) -> None:
    """Update parameters as E = keep · E + (1 − keep) · G; copy integers, and buffers, which a model may replace."""
    mine, others = list(average.parameters()), list(model.parameters())
    is_mean = [parameter.is_floating_point() for parameter in mine]
    torch._foreach_lerp_(list(compress(mine, is_mean)), list(compress(others, is_mean)), 1 - keep)
    for parameter, other in zip(mine, others, strict=True):
        if not parameter.is_floating_point():
            parameter.copy_(other)
    for part, other in zip(average.modules(), model.modules(), strict=True):
        part._buffers = {name: None if held is None else held.clone() for name, held in other._buffers.items()}


def make_equal(networks: list[nn.Module], optimizer: torch.optim.Optimizer) -> None:
    """Average the ranks' BatchNorm statistics; raise if anything else differs between ranks. Collective."""
    for network in networks:
        ddpkit.sync_buffers(network)
    ddpkit.check_replicas(networks, optimizer)


def stop_if_not_finite(first_bad: Tensor, step: int, model: nn.Module, advice: str) -> None:
    """Raise on every rank if a loss or weights are not finite after a step. Collective.

    `first_bad` is the first step, counted from 1, with such a loss on this rank, or `NO_STEP`.
    """
    first = int(first_bad)
    if not all(weights.isfinite().all() for weights in model.parameters()):
        first = min(first, step)
    firsts = ddpkit.all_gather_object(first)
    first = min(firsts)
    if first < NO_STEP:
        raise UserError(
            f"loss or weights are not finite since iteration {first}, first on rank {firsts.index(first)}; "
            f"nothing was saved after it: {advice}"
        )
