"""The form of a checkpoint file's content, and its check: a file may hold anything."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Mapping
from itertools import chain
from types import NoneType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..data.seeds import check_rng_state
from ..launch.ranks import get_rank
from ..parallel.models import strip, unwrap_model, wrapped_paths
from ..parallel.wrap import clean_state_dict
from ..torch_internals import is_dtensor, module_versions, set_module_versions
from .leaves import has_names, path_to
from .sharded import SavedPieces

FORMAT = 1
FORMAT_WITH_PIECES = 2  # of a checkpoint with sharded tensors, whose pieces are in a folder beside it


def explain_unusable(content: Any, with_random_states: bool) -> str:
    """Say why a file's content cannot be used; "" if it has the form that `save()` gives it.

    Args:
        content: The data, of any kind.
        with_random_states: Whether this rank means to set its random number generators from it.
    """
    if not isinstance(content, dict):
        return f"it holds a {type(content).__name__}, which no Checkpointer wrote"
    version = content.get("format")
    if type(version) is not int or version not in (FORMAT, FORMAT_WITH_PIECES):
        return f"its format is {version}, this ddpkit reads {FORMAT} and {FORMAT_WITH_PIECES}"
    is_right = {
        "step": _is_step(content.get("step")),
        "score": type(content.get("score")) in (float, NoneType),
        "state": has_names(content.get("state")),
        "kinds": _are_kinds(content.get("kinds")),
        "shapes": _are_shapes(content.get("shapes")),
        "rng": _are_random_states(content.get("rng")),
        "per_rank": _are_parts(content.get("per_rank")),
        "sharded": version == FORMAT or _is_sharded(content.get("sharded")),
    }
    wrong = [name for name, right in is_right.items() if not right]
    if wrong:
        return f"its {', '.join(wrong)} is missing or not what a Checkpointer writes"
    if with_random_states:
        return _explain_random_states(content["rng"])
    return ""


def _is_step(value: Any) -> bool:
    return type(value) is int and value >= 0  # a bool is none


def _are_kinds(value: Any) -> bool:
    return has_names(value) and all(isinstance(kind, str) for kind in value.values())


def _are_shapes(value: Any) -> bool:
    if not has_names(value) or not all(isinstance(groups, list) for groups in value.values()):
        return False
    groups = [group for groups in value.values() for group in groups]
    return all(isinstance(group, list) and all(map(_are_counts, group)) for group in groups)


def _are_random_states(value: Any) -> bool:
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(state, dict) for state in value)


def _are_parts(value: Any) -> bool:
    if value is None:
        return True
    return isinstance(value, list) and all(_is_part(part) for part in value)


def _is_part(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    if not _are_kinds(value.get("kinds")):
        return False
    return has_names(value.get("per_rank")) and _are_shapes(value.get("shapes"))


def _is_sharded(value: Any) -> bool:
    if not has_names(value) or not has_names(value.get("tensors")):
        return False
    layouts = value["tensors"].values()
    return isinstance(value.get("folder"), str) and all(_is_layout(layout) for layout in layouts)


def _is_layout(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("dtype"), torch.dtype):
        return False
    shape, pieces = value.get("shape"), value.get("pieces")
    if not isinstance(shape, list) or not _are_counts(shape) or not isinstance(pieces, list):
        return False
    return all(_is_piece(piece, len(shape)) for piece in pieces)


def _is_piece(value: Any, dimensions: int) -> bool:
    if not isinstance(value, list) or len(value) != 4:
        return False
    offsets, sizes, file, start = value
    if not _are_counts(offsets) or not _are_counts(sizes) or not _are_counts([file, start]):
        return False
    return len(offsets) == len(sizes) == dimensions


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(number) is int and number >= 0 for number in value)


def _explain_random_states(states: list[dict[str, Any]]) -> str:
    """Say why this rank cannot use the states of generators, given by rank; "" if it can."""
    rank = get_rank()
    if rank >= len(states):
        rank = 0  # whose states new ones are derived from
    try:
        check_rng_state(states[rank])
    except ValueError as error:
        return f"{error}; load(path) without objects still reads the rest"
    return ""


# States of objects: taken to be saved, under names without wrappers, and loaded back.
#
# A wrapper (DDP, DataParallel, `torch.compile`) adds a part to the names of a model's tensors; states
# have none, so that a model may be wrapped differently when it is loaded.

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
