"""Take states of objects, walk their leaves, and name them for the objects they are loaded into.

A wrapper (DDP, DataParallel, `torch.compile`) adds a part to the names of a model's tensors; states omit it, so that a
model may be wrapped differently when it is loaded.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..collectives.differences import digest
from ..collectives.tree import is_dense, name_dtype
from ..parallel.models import strip, unwrap_model, wrapped_paths
from ..torch_internals import is_dtensor, module_versions, set_module_versions

ByName = Mapping[str, Any]  # objects, values or their states
Description = tuple[str, list[list[tuple[int, ...]]]]  # of an object: see `describe_object()`

# Nested values: what they hold, by path. Only exact lists and tuples can be rebuilt; other kinds are leaves then.

_PLAIN = {int, float, bool, str, type(None)}  # a state of a random number generator has hundreds


def walk(path: str, value: Any, with_plain: bool = True) -> list[tuple[str, Any]]:
    """List a nested value by path: each container before what it holds.

    Args:
        path: Path of the value.
        value: The value.
        with_plain: Whether to include numbers, strings and None in containers.
    """
    found = [(path, value)]
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    for key, inner in items:
        if with_plain or type(inner) not in _PLAIN:
            found += walk(path_to(path, key), inner, with_plain)
    return found


def tensors_of(name: str, value: Any) -> list[tuple[str, Any]]:
    """List the tensors of an object or nested value by path, without calling `state_dict()`."""
    if isinstance(value, nn.Module):
        value = dict([*value.named_parameters(), *value.named_buffers()])
    elif isinstance(value, Optimizer):
        value = {"param_groups": value.param_groups, "state": list(value.state.values())}
    return [(path, leaf) for path, leaf in walk(name, value, with_plain=False) if isinstance(leaf, Tensor)]


def tensors_in(values: ByName) -> list[tuple[str, Any]]:
    """List the tensors of objects and nested values, which are given by name."""
    return [pair for name, value in values.items() for pair in tensors_of(name, value)]


def digest_leaves(name: str, state: Any) -> dict[str, str]:
    """Digest each leaf of a nested state, by path.

    Digests differ if one bit of the leaves differs. Containers have one, too, of their class and
    length.
    """
    digests = {}
    for path, value in walk(name, state):
        is_container = isinstance(value, Mapping | list | tuple)
        digests[path] = f"{type(value).__name__} of {len(value)}" if is_container else digest(value)
    return digests


def has_names(value: Any) -> bool:
    """Return whether a value is a mapping with names as keys."""
    return isinstance(value, Mapping) and all(isinstance(name, str) for name in value)


def path_to(container: str, key: Any) -> str:
    """Return the path of a container's value under a key, unique among keys and nestings."""
    if type(key) is str and key.isidentifier():
        return f"{container}.{key}"
    return f"{container}[{key!r}]"


def map_leaves(path: str, state: Any, convert: Callable[[str, Any], Any]) -> Any:
    """Return a nested state with its leaves converted by a function, which also gets their paths.

    NumPy's scalars become Python's first, also as keys: loading NumPy's needs code. Numbers, strings and None in
    containers are not converted. Containers without changes are returned as they are.
    """
    if isinstance(state, Mapping):
        items = dict(state.items())
    elif type(state) in (list, tuple):
        items = dict(enumerate(state))
    else:
        return convert(path, _plain(state))
    converted = {}
    for key, value in items.items():
        if type(value) not in _PLAIN:
            value = map_leaves(path_to(path, key), value, convert)
        converted[_plain(key)] = value
    if all(map(is_, converted, items)) and all(map(is_, converted.values(), items.values())):
        return state
    if isinstance(state, list | tuple):
        return type(state)(converted.values())
    if isinstance(state, OrderedDict):
        converted = OrderedDict(converted)
        converted.__dict__.update(state.__dict__)  # torch's version metadata of a model
    return converted


def take_out(name: str, state: Any, found: dict[str, Any], is_wanted: Callable[[Any], bool] = is_dtensor) -> Any:
    """Return a nested state with some tensors replaced by empty ones on the meta device.

    Args:
        name: Path of the state.
        state: The state; it is not modified.
        found: Receives the tensors, by path.
        is_wanted: Selects the values to replace; by default DTensors.
    """

    def convert(path: str, value: Any) -> Any:
        if not is_wanted(value):
            return value
        found[path] = value
        return torch.empty(value.shape, dtype=value.dtype, device="meta")

    return map_leaves(name, state, convert)


def without_tensors(state: Any) -> Any:
    """Return a nested state with ordinary tensors replaced by their paths."""
    return map_leaves("", state, lambda path, value: path if is_ordinary(value) else value)


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def is_ordinary(value: Any) -> bool:
    """Return whether a value is a tensor of no special class or layout, without attributes."""
    return type(value) in (Tensor, nn.Parameter) and not vars(value) and is_dense(value)


def storage_key(tensor: Tensor) -> tuple[Any, ...]:
    """Return the memory and elements that a tensor refers to."""
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), type(tensor)


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


# Saved values that another dtype cannot hold: loading would change them silently.


def explain_loss(name: str, saved: Tensor, dtype: torch.dtype) -> str:
    """Explain that loading a tensor as this dtype would change it by more than rounding; "" if not.

    A tensor on the meta device is not judged, because its values are unknown.
    """
    if saved.dtype == dtype or saved.is_meta or _holds(dtype, saved):
        return ""
    there = name_dtype(saved.dtype)
    return f"has {name} as {there} in the checkpoint, {name_dtype(dtype)} here, which cannot hold its values"


def _holds(dtype: torch.dtype, saved: Tensor) -> bool:
    """Return whether a tensor keeps its values in another dtype; values that are not integers may be rounded."""
    if saved.is_complex():
        return dtype.is_complex and _holds(dtype.to_real(), torch.view_as_real(saved.resolve_conj()))
    dtype = dtype.to_real() if dtype.is_complex else dtype
    if saved.is_floating_point() and dtype.is_floating_point:
        limit = torch.finfo(dtype).max
        if limit >= torch.finfo(saved.dtype).max:
            return True
        values = saved.double()
        return not (values.isfinite() & (values.abs() > limit)).any()
    has_sign = dtype.is_signed or not saved.dtype.is_signed or not (saved < 0).any()
    return has_sign and torch.equal(saved.to(dtype).to(saved.dtype), saved)
