"""The fit of saved states to objects: all that speaks against it is found before anything loads."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..collectives.digest import digest
from ..collectives.tree import name_dtype
from ..parallel.models import sharing_memory
from ..parallel.wrap import clean_state_dict
from ..torch_internals import is_dtensor
from .states import CHECKED_CLASSES, describe, has_names, match_names, module_state, path_to, tensors_of

_LONGEST = 60  # characters of a value that is shown


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
    if isinstance(target, LRScheduler) and isinstance(state, Mapping):
        return _explain_texts(target.state_dict(), state)
    return []


def _explain_module_misfits(module: nn.Module, saved: Any) -> list[str]:
    if not has_names(saved):
        return [f"is a {type(saved).__name__} there, not a model's state dict"]
    here = module_state(module)
    there = match_names(saved, list(here))
    found = [f"has {key} here, not there" for key in here if key not in there]
    found += [f"has {key} there, not here" for key in there if key not in here]
    for key, value in here.items():  # in this order on every rank, unlike a set
        if key not in there:
            continue
        problem = _explain_entry(key, value, there[key])
        if problem:
            found.append(problem)
    return found


def _explain_entry(key: str, here: Any, there: Any) -> str:
    """Say why one entry of a model's state does not fit; "" if nothing speaks against it."""
    if _shape(there) != _shape(here):
        return f"has {key} of shape {_shape(there)} there, of {_shape(here)} here"
    if not isinstance(here, Tensor):
        return ""
    if here.is_meta:
        problem = f"has {key} on the meta device here, which takes no values"
        return f"{problem}: move it with to_empty() before"
    if not isinstance(there, Tensor):
        return ""
    return explain_loss(key, there, here.dtype)


def _shape(value: Any) -> tuple[int, ...]:
    if not isinstance(value, Tensor):
        return ()
    return tuple(value.shape)


def _explain_optimizer_misfits(optimizer: Optimizer, saved: Any, shapes: Any) -> list[str]:
    """Say why a saved state does not fit an optimizer; [] if nothing speaks against it.

    Args:
        optimizer: The optimizer.
        saved: The state, of any kind.
        shapes: The shapes of the tensors that it is of, as `describe()` gave them, if known.
    """
    if not _is_state(saved):
        return ["is no optimizer's state dict there"]
    there = _group_sizes(saved["param_groups"])
    here = _group_sizes(optimizer.param_groups)
    if there != here:
        return [f"has groups of {there} tensors there, of {here} here"]
    found = _misplaced(optimizer.param_groups, saved["param_groups"])
    for i, (group, saved_group) in enumerate(zip(optimizer.param_groups, saved["param_groups"], strict=True)):
        found += _explain_texts(group, saved_group, f" in group {i}")
    if found:
        return found
    _, mine = describe(optimizer)
    if shapes and shapes != mine:  # a state dict that was saved as plain data has none
        return _explain_shapes(mine, shapes)
    return _explain_losses(optimizer, saved)


def _explain_texts(here: Mapping[str, Any], there: Mapping[str, Any], where: str = "") -> list[str]:
    """Say which settings are text in a file and numbers here, such as a learning rate: torch would take it over."""
    found = []
    for name, value in here.items():
        saved = there.get(name)
        is_number = isinstance(value, int | float | list | tuple | Tensor)
        if is_number and _has_text(saved) and not _has_text(value):
            found.append(f"has {name}={repr(saved)[:_LONGEST]}{where} there, {type(value).__name__} here")
    return found


def _has_text(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_has_text, value))
    return isinstance(value, str)


def _is_state(saved: Any) -> bool:
    try:
        _group_sizes(saved["param_groups"])
        dict(saved["state"])
    except (TypeError, KeyError, IndexError, ValueError, AttributeError):
        return False
    return True


def _group_sizes(groups: Any) -> list[int]:
    return [len(group["params"]) for group in groups]


def _misplaced(here: Any, there: Any) -> list[str]:
    """Say which named parameters have another's index in saved groups of the same sizes."""
    mine = _parameter_names(here)
    found = []
    for index, name in _parameter_names(there).items():
        now = mine.get(index, name)
        if name == now or name not in mine.values():
            continue
        group, number = index
        found.append(
            f"has {name} as tensor {number} of group {group} there, {now} here: "
            "make it of the parameters in the same order"
        )
    return found


def _parameter_names(groups: Any) -> dict[tuple[int, int], str]:
    """Return the names of an optimizer's parameters, without those of wrappers, if it has some."""
    names: dict[tuple[int, int], str] = {}
    for group_index, group in enumerate(groups):
        given = group.get("param_names")
        if isinstance(given, list | tuple):
            names |= {(group_index, i): name for i, name in enumerate(given) if isinstance(name, str)}
    whole = dict.fromkeys(names.values())
    cleaned = clean_state_dict(whole)
    if len(cleaned) < len(whole):  # they were no wrappers'
        return names
    clean = dict(zip(whole, cleaned, strict=True))
    return {index: clean[name] for index, name in names.items()}


def _explain_shapes(mine: list[list[list[int]]], shapes: Any) -> list[str]:
    """Say which tensors have other shapes there, given by group, in a file of any form."""
    found = []
    for group_index, (group, saved_group) in enumerate(zip(mine, shapes, strict=False)):
        for i, (here, there) in enumerate(zip(group, saved_group, strict=False)):
            if here == there:
                continue
            tensor = f"tensor {i} of group {group_index}"
            found.append(f"has {tensor} of shape {tuple(there)} there, of {tuple(here)} here")
    return found or ["has tensors of other shapes there"]


def _explain_losses(optimizer: Optimizer, saved: Any) -> list[str]:
    """Say which tensors of a saved state would be changed by the dtypes of the parameters."""
    if type(optimizer).load_state_dict is not Optimizer.load_state_dict:
        return []  # only torch's own is known to give a state the dtype of its parameter
    parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    keys = chain.from_iterable(group["params"] for group in saved["param_groups"])
    found = []
    for key, parameter in zip(keys, parameters, strict=True):
        if not parameter.is_floating_point():
            continue
        state = saved["state"].get(key)
        if not isinstance(state, Mapping):
            continue
        converted = {name: value for name, value in state.items() if name != "step"}  # which keeps its dtype
        for name, tensor in tensors_of(f"state[{key!r}]", converted):
            problem = explain_loss(name, tensor, parameter.dtype)
            if problem:
                found.append(problem)
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
    """Return whether a tensor keeps its values in another dtype.

    Numbers that are not integers may be rounded.
    """
    if saved.is_complex() and not dtype.is_complex:
        return False
    converted = saved.to(dtype)
    if dtype.is_complex and not saved.is_complex():
        converted = converted.real
    if _has_fractions(saved.dtype) and _has_fractions(dtype):
        return _is_rounded(converted, saved)
    if not torch.equal(converted.to(saved.dtype), saved):
        return False
    return _has_negative(converted) == _has_negative(saved)


def _has_fractions(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _is_rounded(converted: Tensor, saved: Tensor) -> bool:
    """Return whether a tensor is a saved one but for rounding, and the smallest numbers, now 0."""
    limits = torch.finfo(converted.dtype)
    if limits.max >= torch.finfo(saved.dtype).max:
        return True
    if saved.itemsize == 1:  # torch does not compare floats of 8 bits
        saved = saved.float()
    back = converted.to(saved.dtype)  # larger numbers became infinite, NaN, or the largest
    smallest = limits.smallest_normal
    return torch.allclose(back, saved, rtol=limits.eps, atol=smallest, equal_nan=True)


def _has_negative(tensor: Tensor) -> bool:
    return tensor.dtype.is_signed and bool((tensor < 0).any())


# Saved tensors that differ but are meant for the same memory: the last one loaded would win.


def _explain_conflicts(objects: Mapping[str, Any], states: Mapping[str, Any]) -> list[str]:
    """Say which saved tensors differ but would be loaded into the same memory."""
    here, there = _loaded_tensors(objects, states)
    paths = list(here)
    found = []
    for index in sorted(sharing_memory(here.values())):
        path = paths[index]
        for other in paths[:index]:
            if _overwrites(here[path], here[other], there[path], there[other]):
                problem = f"{other} and {path} differ there, but share memory here"
                found.append(f"{problem}: untie them, or load equal ones")
                break
    return found


def _loaded_tensors(
    objects: Mapping[str, Any],
    states: Mapping[str, Any],
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return models' tensors, and those to load into them, by path in the order of loading; none is sharded."""
    mine = {}
    saved = {}
    for name, module in objects.items():
        if not isinstance(module, nn.Module):
            continue
        state = module_state(module)
        matched = match_names(states[name], list(state))
        for key, here in state.items():
            there = matched[key]
            if is_dtensor(here) or not isinstance(there, Tensor) or there.is_meta:
                continue
            if isinstance(here, Tensor) and here.layout is torch.strided:
                mine[path_to(name, key)] = here
                saved[path_to(name, key)] = there
    return mine, saved


@torch.no_grad()
def _overwrites(later: Tensor, earlier: Tensor, saved_later: Tensor, saved_earlier: Tensor) -> bool:
    """Return whether loading the later of two tensors changes the earlier one; it is tried on copies."""
    storage = earlier.untyped_storage()
    if later.untyped_storage().data_ptr() != storage.data_ptr():
        return False
    if _place(earlier) == _place(later) and _place(saved_earlier) == _place(saved_later):
        return False
    memory = torch.empty(storage.nbytes(), dtype=torch.uint8, device="cpu").untyped_storage()
    copies = []
    for tensor in (earlier, later):
        copy = torch.empty(0, dtype=tensor.dtype, device="cpu")
        copies.append(copy.set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride()))
    copies[0].copy_(saved_earlier)
    loaded = digest(copies[0])
    copies[1].copy_(saved_later)
    return digest(copies[0]) != loaded


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """Return which elements of which memory a tensor is."""
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
