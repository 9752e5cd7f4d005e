"""The fit of saved states to objects: all that speaks against it is found before anything loads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..collectives.digest import digest
from ..collectives.tree import name_dtype
from .states import (
    CHECKED_CLASSES,
    describe,
    has_names,
    is_ordinary,
    module_state,
    path_to,
    place_of,
)


def explain_misfits(
    objects: Mapping[str, Any],
    states: Mapping[str, Any],
    kinds: Mapping[str, str],
    shapes: Mapping[str, Any],
) -> list[str]:
    """Say why saved states do not fit objects; [] if nothing speaks against it.

    Args:
        objects: The objects, by name.
        states: The states and plain data that are meant for this rank, by name.
        kinds: The classes of the objects that the states were saved from, where they matter.
        shapes: The shapes of their tensors, as `describe()` gave them, where they matter.
    """
    found = []
    for name, target in objects.items():
        if name not in states:
            names = ", ".join(states) or "nothing"
            found.append(f"it has no {name!r}; it has: {names}")
            continue
        problems = _explain_misfit(target, states[name], kinds.get(name), shapes.get(name))
        found += [f"{name} {problem}" for problem in problems]
    return found or _explain_conflicts(objects, states)


def _explain_misfit(target: Any, state: Any, kind: str | None, shapes: Any) -> list[str]:
    if isinstance(target, nn.Module):
        return _explain_module_misfits(target, state)
    here = type(target).__name__
    if isinstance(target, CHECKED_CLASSES) and kind and kind != here:
        return [f"is {kind} there, {here} here"]
    if isinstance(target, Optimizer):
        return _explain_optimizer_misfits(target, state, shapes)
    return []


def _explain_module_misfits(module: nn.Module, there: Any) -> list[str]:
    if not has_names(there):
        return [f"is a {type(there).__name__} there, not a model's state dict"]
    here = module_state(module)
    found = [f"has {key} here, not there" for key in here if key not in there]
    found += [f"has {key} there, not here" for key in there if key not in here]
    for key, value in here.items():  # in this order on every rank, unlike a set
        if key in there:
            found += _explain_entry(key, value, there[key])
    return found


def _explain_entry(key: str, here: Any, there: Any) -> list[str]:
    """Say why one entry of a model's state does not fit; [] if nothing speaks against it."""
    if _shape(there) != _shape(here):
        return [f"has {key} of shape {_shape(there)} there, of {_shape(here)} here"]
    if not isinstance(here, Tensor):
        return []
    if here.is_meta:
        return [f"has {key} on the meta device here, which takes no values: move it with to_empty() before"]
    problem = explain_loss(key, there, here.dtype) if isinstance(there, Tensor) else ""
    return [problem] if problem else []


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(value.shape) if isinstance(value, Tensor) else ()


def _explain_optimizer_misfits(optimizer: Optimizer, saved: Any, shapes: Any) -> list[str]:
    """Say why a saved state does not fit an optimizer; [] if nothing speaks against it.

    Args:
        optimizer: The optimizer.
        saved: The state, of any kind.
        shapes: The shapes of the tensors that it is of, as `describe()` gave them, if known.
    """
    there = [len(group["params"]) for group in saved["param_groups"]]
    here = [len(group["params"]) for group in optimizer.param_groups]
    if there != here:
        return [f"has groups of {there} tensors there, of {here} here"]
    _, mine = describe(optimizer)
    if not shapes:  # as of a state dict that was saved as plain data
        return []
    found = []
    for index, (group, saved_group) in enumerate(zip(mine, shapes, strict=True)):
        for i, (shape, saved_shape) in enumerate(zip(group, saved_group, strict=True)):
            if shape != saved_shape:
                texts = f"{tuple(saved_shape)} there, of {tuple(shape)} here"
                found.append(f"has tensor {i} of group {index} of shape {texts}")
    return found


# Saved tensors whose values another dtype cannot hold: loading would change them silently.


def explain_loss(name: str, saved: Tensor, dtype: torch.dtype) -> str:
    """Say that loading a tensor as this dtype would change it by more than rounding; "" if not.

    Nothing is said of one on the meta device, whose values are not known yet.
    """
    if saved.dtype == dtype or saved.is_meta or _holds(dtype, saved):
        return ""
    there = name_dtype(saved.dtype)
    return f"has {name} of {there} there, of {name_dtype(dtype)} here, which does not hold its values"


def _holds(dtype: torch.dtype, saved: Tensor) -> bool:
    """Return whether a tensor keeps its values in another dtype; numbers that are not integers may be rounded."""
    if saved.is_complex() and not dtype.is_complex:
        return False
    converted = saved.to(dtype)
    if dtype.is_complex and not saved.is_complex():
        converted = converted.real
    has_fractions = saved.is_floating_point() or saved.is_complex()
    if has_fractions and (dtype.is_floating_point or dtype.is_complex):
        return _is_rounded(converted, saved)
    has_sign = dtype.is_signed or not saved.dtype.is_signed or not (saved < 0).any()
    return has_sign and torch.equal(converted.to(saved.dtype), saved)


def _is_rounded(converted: Tensor, saved: Tensor) -> bool:
    """Return whether a tensor is a saved one but for rounding, and the smallest numbers, now 0."""
    limits = torch.finfo(converted.dtype)
    if limits.max >= torch.finfo(saved.dtype).max:
        return True
    if saved.itemsize == 1:  # torch does not compare floats of 8 bits
        saved = saved.float()
    back = converted.to(saved.dtype)  # larger numbers became infinite, NaN, or the largest
    return torch.allclose(back, saved, rtol=limits.eps, atol=limits.smallest_normal, equal_nan=True)


# Saved tensors that differ but are meant for the same memory: the last one loaded would win.


def _explain_conflicts(objects: Mapping[str, Any], states: Mapping[str, Any]) -> list[str]:
    """Say which saved tensors differ but would be loaded into the same one."""
    found = []
    firsts: dict[Any, tuple[str, Tensor]] = {}  # by their place in memory here
    for name, module in objects.items():
        if not isinstance(module, nn.Module):
            continue
        for key, here in module_state(module).items():
            there = states[name][key]
            if not is_ordinary(here) or not isinstance(there, Tensor) or there.is_meta:
                continue
            path = path_to(name, key)
            other, saved = firsts.setdefault(place_of(here), (path, there))
            if saved is not there and digest(saved) != digest(there):
                problem = f"{other} and {path} differ there, but share memory here"
                found.append(f"{problem}: untie them, or load equal ones")
    return found
