"""Take states of objects, walk their leaves, and name them for the objects they are loaded into.

A wrapper (DDP, DataParallel, `torch.compile`) adds a part to the names of a model's tensors; states omit it, so that a
model may be wrapped differently when it is loaded.
"""

from __future__ import annotations

import importlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..collectives.digest import digest
from ..collectives.tree import is_dense
from ..parallel.models import strip, unwrap_model, wrapped_paths
from ..torch_internals import is_dtensor, module_versions, set_module_versions

Description = tuple[str, list[list[tuple[int, ...]]]]  # of an object: see `describe_object()`


def sharding() -> Any:
    """Import `ddpkit.sharded`, which only jobs with sharded tensors need.

    Call it on all ranks, or while no rank waits for another.
    """
    return importlib.import_module("ddpkit.sharded")


# Nested values: their leaves, by path.


def children(value: Any) -> list[tuple[Any, Any]] | None:
    """List the keys and values of a container of a nested value; None for a leaf."""
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, list | tuple):
        return list(enumerate(value))
    return None


def leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Iterate over the leaves of a nested value, by path."""
    items = children(value)
    if items is None:
        yield path, value
    for key, inner in items or ():
        yield from leaves(path_to(path, key), inner)


def tensors_of(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Iterate over the tensors of an object or nested value, without its state dict."""
    if isinstance(value, nn.Module):
        value = dict([*value.named_parameters(), *value.named_buffers()])
    elif isinstance(value, Optimizer):
        value = {"param_groups": value.param_groups, "state": list(value.state.values())}
    return ((path, leaf) for path, leaf in leaves(name, value) if isinstance(leaf, Tensor))


def digest_leaves(name: str, state: Any) -> dict[str, str]:
    """Digest each leaf of a nested state, by path.

    Digests differ if one bit of the leaves differs. Containers have one, too, of their class and
    length.
    """
    items = children(state)
    if items is None:
        return {name: digest(state)}
    digests = {name: f"{type(state).__name__} of {len(state)}"}
    for key, value in items:
        digests.update(digest_leaves(path_to(name, key), value))
    return digests


def has_names(value: Any) -> bool:
    """Return whether a value is a mapping with names as keys."""
    return isinstance(value, Mapping) and all(isinstance(name, str) for name in value)


def path_to(container: str, key: Any) -> str:
    """Return the path of a container's value under a key, unique among keys and nestings."""
    if type(key) is str and key.isidentifier():
        return f"{container}.{key}"
    return f"{container}[{key!r}]"


def take_out(
    name: str,
    state: Any,
    found: dict[str, Any],
    is_wanted: Callable[[Any], bool] = is_dtensor,
) -> Any:
    """Return a nested state with some tensors replaced by empty ones on the meta device.

    NumPy's scalars become Python's: loading NumPy's needs code.

    Args:
        name: Path of the state.
        state: The state; it is not modified.
        found: Receives the tensors, by path.
        is_wanted: Selects the values to replace; by default DTensors.
    """

    def convert(path: str, value: Any) -> Any:
        if is_wanted(value):
            found[path] = value
            return torch.empty(value.shape, dtype=value.dtype, device="meta")
        return _plain(value)

    return map_leaves(name, state, convert)


def map_leaves(name: str, state: Any, convert: Callable[[str, Any], Any]) -> Any:
    """Return a nested state with its leaves and keys converted by a function, which also gets their paths.

    Containers without changes are returned as they are.
    """
    if isinstance(state, Mapping):
        items = {}
        for key, value in state.items():
            path = path_to(name, key)
            items[convert(path, key)] = map_leaves(path, value, convert)
        return same_mapping(state, items)
    if type(state) not in (list, tuple):
        return convert(name, state)
    values = []
    for i, value in enumerate(state):
        values.append(map_leaves(path_to(name, i), value, convert))
    if all(new is old for new, old in zip(values, state, strict=True)):
        return state
    return type(state)(values)


def without_tensors(state: Any) -> Any:
    """Return a nested state with ordinary tensors replaced by their paths."""
    return map_leaves("", state, lambda path, value: path if is_ordinary(value) else _plain(value))


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def is_ordinary(value: Any) -> bool:
    """Return whether a value is a tensor of no special class or layout, without attributes."""
    return type(value) in (Tensor, nn.Parameter) and not vars(value) and is_dense(value)


def place_of(tensor: Tensor) -> tuple[Any, ...]:
    """Return the memory and elements that a tensor refers to."""
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), type(tensor)


def find_stand_ins(name: str, state: Any) -> dict[str, Tensor]:
    """Find the tensors on the meta device in a nested state, by the paths from `take_out()`."""
    return {path: tensor for path, tensor in tensors_of(name, state) if tensor.is_meta}


def same_mapping(state: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """Return a mapping like `state` with these items; `state` itself if they are its own."""
    if all(new is old and items[new] is state[old] for new, old in zip(items, state, strict=True)):
        return state
    if isinstance(state, OrderedDict):
        copy = OrderedDict(items)
        copy.__dict__.update(state.__dict__)  # torch's version metadata of a model
        return copy
    return items


# States of objects, with names without wrappers.

_WRAPPING = {"accelerate": ("optimizer", "scheduler"), "lightning_fabric": ("optimizer",), "lightning": ("optimizer",)}


def unwrap(value: Any) -> Any:
    """Return the optimizer or scheduler that accelerate or Fabric has wrapped; anything else as it is."""
    library = type(value).__module__.partition(".")[0]
    if isinstance(value, nn.Module):
        return value
    for name in _WRAPPING.get(library, ()):
        if hasattr(value, name):
            return unwrap(getattr(value, name))
    return value


def state_of(value: Any) -> Any:
    """Return an object's state to save, or the value itself if it has none."""
    if isinstance(value, nn.Module):
        return module_state(value)
    if hasattr(value, "state_dict"):
        return value.state_dict()
    return value


def module_state(model: nn.Module) -> dict[str, Any]:
    """Return a model's state dict with names free of wrappers in and around it."""
    model = unwrap_model(model)
    state = model.state_dict()
    wrapped = wrapped_paths(model)
    if not wrapped:
        return state
    renamed = OrderedDict((strip(key, wrapped), value) for key, value in state.items())
    versions = module_versions(state).items()
    set_module_versions(renamed, {strip(path, wrapped): version for path, version in versions})
    return renamed


def state_for(target: Any, saved: Any) -> Any:
    """Return a saved state for an object, with the names in the unwrapped object."""
    if not isinstance(target, nn.Module):
        return saved
    model = unwrap_model(target)
    here = model.state_dict()  # its keys still include the wrappers inside the model
    wrapped = wrapped_paths(model)
    state = OrderedDict((key, saved[strip(key, wrapped)]) for key in here)
    versions = module_versions(saved)
    by_path = {path: versions.get(strip(path, wrapped), {}) for path in module_versions(here)}
    set_module_versions(state, by_path)
    return state


def describe_object(value: Any) -> Description:
    """Describe an object, so that a load can check whether its state fits another.

    Returns:
        The class of an optimizer or scheduler, "" for others; the shapes of an optimizer's tensors, by
        group, [] for others.
    """
    # a state of another optimizer class loads without an error, and fails later
    kind = type(value).__name__ if isinstance(value, Optimizer | LRScheduler) else ""
    groups = value.param_groups if isinstance(value, Optimizer) else []
    return kind, [[tuple(tensor.shape) for tensor in group["params"]] for group in groups]
