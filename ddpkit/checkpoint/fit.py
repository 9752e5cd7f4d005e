"""The fit of saved states to objects: all that speaks against it is found before anything loads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from .dtypes import explain_loss
from .leaves import has_names
from .optimizer_fit import explain_optimizer_misfits, explain_texts
from .shared_memory import explain_conflicts
from .states import CHECKED_CLASSES, match_names, module_state


class Saved(NamedTuple):
    """The states of a checkpoint that are meant for this rank, by name.

    Attributes:
        states: The states and plain data.
        kinds: The classes of the objects that the states were saved from, where they matter.
        shapes: The shapes of their tensors, as `describe()` gave them, where they matter.
    """

    states: dict[str, Any]
    kinds: dict[str, str]
    shapes: dict[str, Any]


def explain_misfits(objects: Mapping[str, Any], saved: Saved) -> list[str]:
    """Say why saved states do not fit objects, given by name; [] if nothing speaks against it."""
    found = []
    for name, target in objects.items():
        if name not in saved.states:
            names = ", ".join(saved.states) or "nothing"
            found.append(f"it has no {name!r}; it has: {names}")
            continue
        kind = saved.kinds.get(name)
        problems = _explain_misfit(target, saved.states[name], kind, saved.shapes.get(name))
        found += [f"{name} {problem}" for problem in problems]
    if found:
        return found
    modules = {}
    for name, target in objects.items():
        if isinstance(target, nn.Module):
            modules[name] = (target, saved.states[name])
    return explain_conflicts(modules)


def _explain_misfit(target: Any, state: Any, kind: str | None, shapes: Any) -> list[str]:
    if isinstance(target, nn.Module):
        return _explain_module_misfits(target, state)
    here = type(target).__name__
    if isinstance(target, CHECKED_CLASSES) and kind and kind != here:
        return [f"is {kind} there, {here} here"]
    if isinstance(target, Optimizer):
        return explain_optimizer_misfits(target, state, shapes)
    if isinstance(target, LRScheduler) and isinstance(state, Mapping):
        return explain_texts(target.state_dict(), state)
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
