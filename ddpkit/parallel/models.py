"""Unwrap a model, and its state dicts; check, overwrite and describe its tensors."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Any, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy

from ..collectives.consistency import check_fingerprint, fingerprint_of
from ..collectives.differences import explain_sharded
from ..collectives.transfer import broadcast_tensor
from ..collectives.tree import flat_bytes, name_dtype
from ..job import current_job
from ..job.job import ranks_of
from ..torch_internals import has_no_memory, is_compiled, is_dtensor, module_versions, set_module_versions

M = TypeVar("M", bound=nn.Module)


def child_of_wrapper(module: nn.Module) -> str:
    """Return the name of the attribute in which a wrapper holds the model; "" if it is not a wrapper."""
    if isinstance(module, DataParallel | DistributedDataParallel):
        return "module"
    if is_compiled(module):
        return "_orig_mod"
    if type(module).__name__ == "_FabricModule":  # what Lightning Fabric's `setup()` returns
        return "_forward_module"
    return ""


@overload
def unwrap_model(model: DistributedDataParallel) -> nn.Module: ...
@overload
def unwrap_model(model: DataParallel[M]) -> M: ...
@overload
def unwrap_model(model: M | DistributedDataParallel | DataParallel[M]) -> M: ...
def unwrap_model(model: nn.Module) -> nn.Module:
    """Return the model itself, without DDP, DataParallel, `torch.compile` and Fabric's wrapper in any nesting.

    A submodule of the model named `module` stays.

    Example:
        >>> net = nn.Linear(2, 1)
        >>> unwrap_model(nn.DataParallel(net)) is net
        True
    """
    while child := child_of_wrapper(model):
        model = model.get_submodule(child)
    return model


def wrapped_paths(model: nn.Module) -> set[str]:
    """Find the paths in a model where a wrapper holds a module, such as "actor.module"."""
    modules = model.named_modules(remove_duplicate=False)
    children = ((path, child_of_wrapper(module)) for path, module in modules)
    return {f"{path}.{child}" if path else child for path, child in children if child}


def _paths(name: str) -> Iterator[str]:
    """Iterate over the paths to a name, from the outermost one: "a", "a.b", "a.b.c"."""
    return accumulate(name.split("."), "{}.{}".format)


def strip(name: str, wrapped: set[str]) -> str:
    """Remove the parts at these paths from a dotted name."""
    return ".".join(path.rpartition(".")[2] for path in _paths(name) if path not in wrapped)


def clean_state_dict(state_dict: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """Rename the keys of a wrapped or compiled model's state dict to those of the model itself.

    Use it for files from elsewhere; for a model in memory use `unwrap_model(model).state_dict()`.
    It removes `module.` and `_orig_mod.` at each level where all keys share them, as under
    wrappers. A real submodule named `module` loses its name, too, unless it has siblings. torch's
    version metadata is kept.

    Args:
        state_dict: A complete state dict; it is not modified.

    Returns:
        A new `OrderedDict` with the same values in the same order.

    Example:
        >>> state = {"module._orig_mod.0.weight": 1, "module._orig_mod.1.module.bias": 2}
        >>> dict(clean_state_dict(state))
        {'0.weight': 1, '1.bias': 2}
    """
    wrappers = _find_wrappers(state_dict)
    cleaned = OrderedDict((strip(key, wrappers), value) for key, value in state_dict.items())
    if versions := module_versions(state_dict):
        set_module_versions(cleaned, {strip(path, wrappers): version for path, version in versions.items()})
    return cleaned


def _find_wrappers(keys: Iterable[str]) -> set[str]:
    """Find the paths of modules that look like the only child of a wrapper: "actor.module"."""
    children: dict[str, set[str]] = {}
    for key in keys:
        parent = ""
        for child in _paths(key):
            children.setdefault(parent, set()).add(child)
            parent = child
    parents = {child for siblings in children.values() if len(siblings) == 1 for child in siblings & children.keys()}
    return {path for path in parents if path.rpartition(".")[2] in ("module", "_orig_mod")}


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Name a model's parameters, then its buffers, as the unwrapped model does."""
    return named_parameters(model) | unwrapped_names(model, model.named_buffers())


def named_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Name a model's parameters, as the unwrapped model does."""
    return unwrapped_names(model, model.named_parameters())


def unwrapped_names(model: nn.Module, named: Iterable[tuple[str, Tensor]], kind: str = "") -> dict[str, Tensor]:
    """Name some of a model's tensors as the unwrapped model does, after the word for their kind."""
    wrapped = wrapped_paths(model)
    return {kind + strip(name, wrapped): tensor for name, tensor in named}


def check_module(call: str, model: object) -> None:
    """Raise if an argument is not a module.

    Raises:
        TypeError: If it is not.
    """
    if not isinstance(model, nn.Module):
        remedy = " Call it for each of them." if isinstance(model, list | tuple | dict) else ""
        raise TypeError(f"{call} takes a torch.nn.Module, got {type(model).__name__}.{remedy}")


def without_dtensors(tensors: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """Drop the tensors that `fully_shard` and tensor parallelism made."""
    return [(name, tensor) for name, tensor in tensors if not is_dtensor(tensor)]


def check_tensors(call: str, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Raise if some tensors' values are not all on this rank.

    Raises:
        TypeError: If some are sharded.
        ValueError: If some are not initialised yet, or on the meta device.
    """
    tensors = list(tensors)
    if problem := explain_sharded(call, tensors):
        raise TypeError(problem)
    for name, tensor in tensors:
        if is_lazy(tensor):
            raise ValueError(f"{call} needs initialised tensors, but {name} is lazy: call the model once first.")
        if tensor.is_meta:
            raise ValueError(
                f"{call} needs values, but {name} is on the meta device: call to_empty(device=ddpkit.get_device()) "
                "and initialise the model first."
            )


def broadcast_into(tensors: list[Tensor]) -> None:
    """Overwrite tensors with those of rank 0, or of the first data-parallel rank. Collective."""
    peers = current_job.data_parallel()
    check_fingerprint(fingerprint_of("a broadcast of tensors", describe_tensors(dict(enumerate(tensors)))), peers)
    for tensor in tensors:
        data = broadcast_tensor(flat_bytes(tensor).clone(), ranks_of(peers)[0], peers)
        tensor.copy_(data.view(tensor.dtype).reshape(tensor.shape))


def can_be_overwritten(tensors: Iterable[Tensor | None]) -> list[bool]:
    """Return for each tensor whether it can be overwritten after those that cannot were replaced by new ones."""
    memory: set[int | None] = {None}  # of tensors that can be overwritten
    fit = []
    for tensor in tensors:
        start = None
        if tensor is not None and tensor.layout is torch.strided and tensor.is_contiguous():
            start = None if tensor.is_inference() or has_no_memory(tensor) else tensor.untyped_storage().data_ptr()
        fit.append(start not in memory)
        memory.add(start)
    return fit


def describe_tensors(tensors: Mapping[Any, Tensor]) -> dict[str, str]:
    """Describe each tensor by dtype and shape, and name frozen parameters so."""
    return {
        str(name): f"{name_dtype(tensor.dtype)}{list(tensor.shape)}{mark_if_frozen(tensor)}"
        for name, tensor in tensors.items()
    }


def mark_if_frozen(tensor: Any) -> str:
    """Return ", frozen" for a parameter that needs no gradient."""
    return ", frozen" if isinstance(tensor, nn.Parameter) and not tensor.requires_grad else ""
