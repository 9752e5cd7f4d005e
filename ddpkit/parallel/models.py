"""Unwrap a model; check, overwrite and describe its tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
from ..torch_internals import has_no_memory, is_compiled, is_dtensor

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
    found = set()
    for path, module in model.named_modules(remove_duplicate=False):
        child = child_of_wrapper(module)
        if child:
            found.add(join_path(path, child))
    return found


def join_path(path: str, name: str) -> str:
    """Join a dotted path, possibly empty, and the name of a child."""
    if not path:
        return name
    return f"{path}.{name}"


def strip(name: str, wrapped: set[str]) -> str:
    """Remove the parts at these paths from a dotted name."""
    path = ""
    kept = []
    for part in name.split("."):
        path = join_path(path, part)
        if path not in wrapped:
            kept.append(part)
    return ".".join(kept)


def named_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Name a model's parameters, then its buffers, as the unwrapped model does."""
    return [*named_parameters(model), *named_buffers(model)]


def named_parameters(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Name a model's parameters, as the unwrapped model does."""
    wrapped = wrapped_paths(model)
    return [(strip(name, wrapped), parameter) for name, parameter in model.named_parameters()]


def named_buffers(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Name a model's buffers, as the unwrapped model does."""
    wrapped = wrapped_paths(model)
    return [(strip(name, wrapped), buffer) for name, buffer in model.named_buffers()]


def check_module(call: str, model: object) -> None:
    """Raise if an argument is not a module.

    Raises:
        TypeError: If it is not.
    """
    if isinstance(model, nn.Module):
        return
    problem = f"{call} takes a torch.nn.Module, got {type(model).__name__}."
    if isinstance(model, list | tuple | dict):
        problem += " Call it for each of them."
    raise TypeError(problem)


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
    problem = explain_sharded(call, tensors)
    if problem:
        raise TypeError(problem)
    for name, tensor in tensors:
        if is_lazy(tensor):
            remedy = "call the model once first"
            raise ValueError(f"{call} needs initialised tensors, but {name} is lazy: {remedy}.")
        if tensor.is_meta:
            remedy = "call to_empty(device=ddpkit.get_device()) and initialise the model first"
            raise ValueError(f"{call} needs values, but {name} is on the meta device: {remedy}.")


def broadcast_into(tensors: list[Tensor]) -> None:
    """Overwrite tensors with those of rank 0, or of the first data-parallel rank. Collective."""
    peers = current_job.data_parallel()
    check_fingerprint(fingerprint_of("a broadcast of tensors", describe_tensors(dict(enumerate(tensors)))), peers)
    for tensor in tensors:
        data = broadcast_tensor(flat_bytes(tensor).clone(), ranks_of(peers)[0], peers)
        tensor.copy_(data.view(tensor.dtype).reshape(tensor.shape))


def can_be_overwritten(tensors: Iterable[Tensor | None]) -> list[bool]:
    """Return for each tensor whether it can be overwritten after those that cannot were replaced by new ones."""
    memory = set()  # of tensors that can be overwritten
    fit = []
    for tensor in tensors:
        if tensor is None or tensor.layout is not torch.strided or not tensor.is_contiguous():
            fit.append(False)
            continue
        if tensor.is_inference() or has_no_memory(tensor):
            fit.append(False)
            continue
        start = tensor.untyped_storage().data_ptr()
        fit.append(start not in memory)
        memory.add(start)
    return fit


def describe_tensors(tensors: Mapping[Any, Tensor]) -> dict[str, str]:
    """Describe each tensor by dtype and shape."""
    return {str(name): f"{name_dtype(tensor.dtype)}{list(tensor.shape)}" for name, tensor in tensors.items()}
