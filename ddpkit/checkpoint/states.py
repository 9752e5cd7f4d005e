"""States of objects: taken to be saved, under names without wrappers, and loaded back.

A wrapper (DDP, DataParallel, `torch.compile`) adds a part to the names of a model's tensors; states
have none, so that a model may be wrapped differently when it is loaded.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Mapping
from itertools import chain
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..parallel.models import strip, unwrap_model, wrapped_paths
from ..parallel.wrap import clean_state_dict
from ..torch_internals import is_dtensor, module_versions, set_module_versions
from .leaves import path_to
from .pieces import SavedPieces

# a state of another class of these loads without an error, and fails later
CHECKED_CLASSES = (Optimizer, LRScheduler)


def state_of(value: Any) -> Any:
    """Return the state to save of an object, or the value itself if it has none."""
    if isinstance(value, nn.Module):
        return module_state(value)
    if hasattr(value, "state_dict"):
        return value.state_dict()
    return value


def module_state(model: nn.Module) -> dict[str, Any]:
    """Return a model's state dict under the names that it has without wrappers in and around it."""
    model = unwrap_model(model)
    state = model.state_dict()
    wrapped = wrapped_paths(model)
    if not wrapped:
        return state
    renamed = OrderedDict((strip(key, wrapped), value) for key, value in state.items())
    versions = module_versions(state).items()
    set_module_versions(renamed, {strip(path, wrapped): version for path, version in versions})
    return renamed


def load_into(name: str, target: Any, saved: Any, pieces: SavedPieces) -> None:
    """Load a state into an object that it fits.

    Args:
        name: The object's, for messages.
        target: The object.
        saved: The state.
        pieces: The sharded tensors of the state.
    """
    if isinstance(target, nn.Module):
        _load_into_module(name, target, saved, pieces)
    elif isinstance(target, Optimizer):
        target.load_state_dict(_for_optimizer(name, target, saved, pieces))
    else:
        target.load_state_dict(pieces.fill(name, saved, target.state_dict()))


def _load_into_module(name: str, target: nn.Module, saved: Any, pieces: SavedPieces) -> None:
    model = unwrap_model(target)
    here = model.state_dict()  # its keys still name the wrappers inside the model
    wrapped = wrapped_paths(model)
    names = {key: strip(key, wrapped) for key in here}
    matched = match_names(saved, list(names.values()))
    state = OrderedDict()
    for key, clean in names.items():
        state[key] = matched[clean]
        if is_dtensor(here[key]) or pieces.holds(matched[clean]):
            # in place, so that no other copy is needed; then it is loaded from itself
            pieces.read_into(path_to(name, clean), here[key], matched[clean])
            state[key] = here[key]
    versions = module_versions(saved)
    if versions and matched is saved:
        by_path = {path: versions.get(strip(path, wrapped), {}) for path in module_versions(here)}
        set_module_versions(state, by_path)
    model.load_state_dict(state)


def _for_optimizer(name: str, optimizer: Optimizer, saved: Any, pieces: SavedPieces) -> Any:
    """Return a saved state with each parameter's tensors spread over the ranks as the parameter is."""
    parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    keys = chain.from_iterable(group["params"] for group in saved["param_groups"])
    states = dict(saved["state"])
    for key, parameter in zip(keys, parameters, strict=True):
        if key in states:
            likeness = {kind: parameter for kind in states[key] if kind != "step"}
            states[key] = pieces.fill(f"{name}.state[{key!r}]", states[key], likeness)
    return {**saved, "state": states}


def match_names(saved: Mapping[str, Any], names: list[str]) -> Mapping[str, Any]:
    """Return a saved state under these names.

    It is the state itself if it has them. Else its names are those of wrappers, which are left out
    as far as can be guessed; some of these names may then be missing.
    """
    if saved.keys() == set(names):
        return saved
    guessed = clean_state_dict(saved)
    cleaned = list(clean_state_dict(dict.fromkeys(names)))
    if guessed.keys() == set(cleaned):
        return {name: guessed[clean] for name, clean in zip(names, cleaned, strict=True)}
    if guessed.keys().isdisjoint(names):
        return saved
    return guessed


def describe(value: Any) -> tuple[str, list[list[list[int]]]]:
    """Describe an object, so that a load can tell if its state fits another.

    Returns:
        The class of an optimizer or scheduler, "" for others; the shapes of an optimizer's tensors,
        by group, [] for others.
    """
    kind = ""
    if isinstance(value, CHECKED_CLASSES):
        kind = type(value).__name__
    shapes = []
    if isinstance(value, Optimizer):
        for group in value.param_groups:
            shapes.append([list(tensor.shape) for tensor in group["params"]])
    return kind, shapes


def is_fsdp(value: Any) -> bool:
    """Return whether a model is wrapped in torch's first FSDP, whose tensors look ordinary."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # which takes long to import
    kind = getattr(fsdp, "FullyShardedDataParallel", None)
    if kind is None or not isinstance(value, nn.Module):
        return False
    return any(isinstance(module, kind) for module in value.modules())


def is_consolidated(value: Any) -> bool:
    """Return whether an optimizer collects the state that it spreads over ranks.

    ZeroRedundancyOptimizer does.
    """
    return isinstance(value, Optimizer) and hasattr(value, "consolidate_state_dict")
