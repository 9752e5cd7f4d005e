"""A device that computes on the CPU and, like a GPU, refuses tensors that were not moved to it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

import ddpkit.job.current_job
import ddpkit.job.lifecycle

DEVICE = torch.device("cpu", 0)  # the host's tensors are on "cpu"
MAY_MIX = {Tensor.copy_, Tensor.data.__set__, Tensor.to, torch._has_compatible_shallow_copy_type}  # type: ignore[attr-defined]
INDEXING = {Tensor.__getitem__, Tensor.__setitem__}
TO_NUMPY: set[Any] = {Tensor.numpy, Tensor.__array__}


class StandIn(TorchFunctionMode):
    """Marks the storages on the device: of what is moved or made there, and of what is computed from that."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = tensors_of((args, kwargs))
        is_there = any(map(is_on_device, given))
        if func == Tensor.device.__get__ and is_there:
            return DEVICE
        if func in TO_NUMPY and is_there:
            raise TypeError("can't convert a tensor on the device to numpy")
        compared = given[:1] if func in INDEXING and is_there else given  # an index may be on the host
        if func not in MAY_MIX and len({is_on_device(tensor) for tensor in compared if tensor.dim()}) > 1:
            raise RuntimeError(f"{func.__name__}: expected all tensors to be on the same device")
        result = func(*args, **kwargs)
        target = device_of(func, args, kwargs)
        if target is not None:
            is_there = target == DEVICE
            if args and result is args[0] and is_on_device(result) != is_there:
                result = result.clone()
        if is_there and func is not Tensor.copy_:
            for tensor in tensors_of(result):
                tensor.untyped_storage().is_on_device = True  # type: ignore[attr-defined]
        return result


def tensors_of(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def is_on_device(tensor: Tensor) -> bool:
    return hasattr(tensor.untyped_storage(), "is_on_device")


def device_of(func: Any, args: Any, kwargs: Any) -> torch.device | None:
    """The device that a call asks for."""
    if func is Tensor.cpu:
        return torch.device("cpu")
    asked = [kwargs.get("device"), *(args[1:2] if func is Tensor.to else ())]
    if func is Tensor.to and tensors_of(asked):
        return DEVICE if is_on_device(args[1]) else torch.device("cpu")
    return next((torch.device(device) for device in asked if isinstance(device, (str, torch.device))), None)


def use_stand_in() -> None:
    """From now on this process has the device, and `setup()` takes it."""
    for module in (ddpkit.job.current_job, ddpkit.job.lifecycle):
        module.choose_device = lambda *_: DEVICE  # type: ignore[attr-defined]
    StandIn().__enter__()  # type: ignore[no-untyped-call]
