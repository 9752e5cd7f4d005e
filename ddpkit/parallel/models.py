"""Models and their tensors at the border: what a wrapper holds, and what no function here can handle."""

from __future__ import annotations

import sys
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy

from ..collectives.sharded import explain_sharded


def child_of_wrapper(module: nn.Module) -> str:
    """Name the attribute in which a wrapper of torch's holds the model; "" if the module is none."""
    if isinstance(module, DataParallel | DistributedDataParallel):
        return "module"
    compiled = getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", None)  # takes long to import
    return "_orig_mod" if compiled is not None and isinstance(module, compiled) else ""


def unwrap_model(model: nn.Module) -> nn.Module:
    """Return the model itself, out of DDP, DataParallel and `torch.compile` in any nesting.

    A submodule of its own that is called `module` stays where it is.

    Example:
        >>> net = nn.Linear(2, 1)
        >>> unwrap_model(nn.DataParallel(net)) is net
        True
    """
    while child := child_of_wrapper(model):
        model = model.get_submodule(child)
    return model


def wrapped_paths(model: nn.Module) -> set[str]:
    """Find where a model's tensors have the name of a wrapper's attribute in theirs, such as "actor.module"."""
    found = set()
    for path, module in model.named_modules(remove_duplicate=False):
        if child := child_of_wrapper(module):
            found.add(f"{path}.{child}" if path else child)
    return found


def strip(name: str, wrapped: set[str]) -> str:
    """Leave the parts that stand at these paths out of a dotted name."""
    path, kept = "", []
    for part in name.split("."):
        path = f"{path}.{part}" if path else part
        if path not in wrapped:
            kept.append(part)
    return ".".join(kept)


def named_tensors(model: nn.Module) -> Iterable[tuple[str, Tensor]]:
    """Name a model's parameters, then its buffers, as the model itself does without wrappers."""
    wrapped = wrapped_paths(model)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        yield strip(name, wrapped), tensor


def check_module(call: str, model: object) -> None:
    """Refuse what is no module.

    Raises:
        TypeError: If it is none.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"{call} takes a torch.nn.Module, got {type(model).__name__}.")


def check_tensors(call: str, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Refuse tensors whose values are not all on this rank.

    Raises:
        TypeError: If some are sharded.
        ValueError: If some are not initialised yet, or on the meta device.
    """
    tensors = list(tensors)
    if problem := explain_sharded(call, tensors):
        raise TypeError(problem)
    for name, tensor in tensors:
        if is_lazy(tensor):
            raise ValueError(f"{call} needs initialised tensors, but {name} is lazy: call the model once before.")
        if tensor.is_meta:
            raise ValueError(
                f"{call} needs tensors that have values, but {name} is on the meta device: "
                "move the model with to_empty(device=ddpkit.get_device()) and initialise it before."
            )


def check_writable(call: str, name: str, tensor: Tensor) -> None:
    """Refuse a tensor that cannot be overwritten with another rank's values.

    Raises:
        ValueError: If it is nested, or shares its elements' memory, or was made in inference mode.
    """
    if tensor.is_nested:
        raise ValueError(f"{call} needs dense tensors, but {name} is nested: keep its parts, or a padded one.")
    if not writable(tensor):
        raise ValueError(f"{call} cannot write to {name}, which was expanded or made in inference mode: clone it.")


def writable(tensor: Tensor) -> bool:
    """Return whether every element can be written to, and by itself: an expanded tensor's share their memory."""
    if tensor.is_inference() or tensor._is_zerotensor():  # a derivative that is 0 everywhere has no memory
        return False
    if tensor.layout is not torch.strided or tensor.is_contiguous():
        return True
    end = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= end:
            return False
        end += stride * (size - 1)
    return True


def sharing_memory(tensors: Iterable[Tensor | None]) -> set[int]:
    """Find the tensors, by place, that may share memory with one before them in the list."""
    spans = []
    for place, tensor in enumerate(tensors):
        if tensor is None:
            continue
        if tensor.layout is not torch.strided or tensor.is_nested:
            continue
        length = tensor.nbytes
        if not length:
            continue
        if not tensor.is_contiguous():
            length = _reach(tensor)
        start = tensor.data_ptr()
        spans.append((start, start + length, place))
    spans.sort()
    found = set()
    first = reach = 0
    for start, end, place in spans:
        if start >= reach:
            first, reach = place, end
            continue
        found.add(max(first, place))
        first = min(first, place)
        reach = max(reach, end)
    return found


def describe_sharing(tensors: Iterable[Tensor]) -> list[str]:
    """Say of each tensor where it lies in memory that it shares with one before it; "" if it shares none.

    Ranks that agree in it may write to the tensors one after the other: all get the same values.
    """
    tensors = list(tensors)
    shared = sharing_memory(tensors)
    texts = []
    for place, tensor in enumerate(tensors):
        if place in shared:
            texts.append(f", sharing memory from element {tensor.storage_offset()}")
        else:
            texts.append("")
    return texts


def _reach(tensor: Tensor) -> int:
    """Return the number of bytes from a tensor's first element to the end of its last."""
    steps = zip(tensor.stride(), tensor.shape, strict=True)
    last = sum(stride * (size - 1) for stride, size in steps)
    return (last + 1) * tensor.element_size()
