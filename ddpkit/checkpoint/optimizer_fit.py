"""The fit of a saved state to an optimizer: torch looks at the sizes of groups only."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ..parallel.wrap import clean_state_dict
from .dtypes import explain_loss
from .leaves import tensors_of
from .states import describe

_LONGEST = 60  # characters of a value that is shown

Index = tuple[int, int]  # of a tensor in an optimizer: the number of its group, and that in it


def explain_optimizer_misfits(optimizer: Optimizer, saved: Any, shapes: Any) -> list[str]:
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
        found += explain_texts(group, saved_group, f" in group {i}")
    if found:
        return found
    _, mine = describe(optimizer)
    if shapes and shapes != mine:  # a state dict that was saved as plain data has none
        return _explain_shapes(mine, shapes)
    return _explain_losses(optimizer, saved)


def explain_texts(here: Mapping[str, Any], there: Mapping[str, Any], where: str = "") -> list[str]:
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


def _parameter_names(groups: Any) -> dict[Index, str]:
    """Return the names of an optimizer's parameters, without those of wrappers, if it has some."""
    names: dict[Index, str] = {}
    for group_index, group in enumerate(groups):
        given = group.get("param_names")
        if not isinstance(given, list | tuple):
            continue
        for i, name in enumerate(given):
            if isinstance(name, str):
                names[group_index, i] = name
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
        for name, tensor in _converted_tensors(key, saved["state"].get(key)):
            problem = explain_loss(name, tensor, parameter.dtype)
            if problem:
                found.append(problem)
    return found


def _converted_tensors(key: Any, state: Any) -> list[tuple[str, Any]]:
    """Name the tensors in the state of one parameter to which torch gives its dtype."""
    tensors: list[tuple[str, Any]] = []
    if not isinstance(state, Mapping):
        return tensors
    for name, value in state.items():
        if name != "step":  # which keeps its own
            tensors.extend(tensors_of(f"state[{key!r}].{name}", value))
    return tensors
