"""Tell which tensors are dense, read their bytes, and join them. Nothing here talks to other ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..torch_internals import has_no_memory, is_dtensor, is_sharded


def explain_not_dense(tensor: Tensor) -> str:
    """Say why a tensor's elements are not simply those in its memory; "" if they are."""
    kind = type(tensor)
    if kind not in (Tensor, nn.Parameter):
        if is_sharded(tensor):
            return "a sharded tensor (fully_shard, FSDP, tensor parallelism; pass tensor.full_tensor())"
        if kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ or nn.parameter.is_lazy(tensor):
            return f"{kind.__name__}, a kind of tensor whose memory does not show its values"
    if tensor.is_meta:
        return "a meta tensor, which has no values"
    if tensor.is_nested:
        return "a nested tensor (pass a dense one)"
    if tensor.layout != torch.strided:
        layout = str(tensor.layout).removeprefix("torch.")
        return f"a {layout} tensor (pass a dense one)"
    if tensor.is_quantized:
        return f"a {name_dtype(tensor.dtype)} tensor (pass tensor.dequantize())"
    return ""


def whole(tensor: Tensor) -> Tensor:
    """Return the whole tensor that a DTensor stands for if no rank lacks a part of it; any other as it is.

    Terms of a sum that its ranks hold (`Partial`) are added up. Collective then, over its mesh.
    """
    if not is_dtensor(tensor):
        return tensor
    placed: Any = tensor.detach()
    if any(placement.is_shard() for placement in placed.placements):
        return tensor
    found: Tensor = placed.full_tensor()
    return found


def local_part(tensor: Any) -> Tensor:
    """Return the part of a DTensor that is on this rank; any other tensor as it is."""
    part: Tensor = tensor.to_local() if is_dtensor(tensor) else tensor
    return part


def is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor's elements are those in its memory, one after the other or strided."""
    return not explain_not_dense(tensor)


def is_tensor(value: Any) -> bool:
    """Return whether a value is a tensor: what a walk through a tree of them stops at."""
    return isinstance(value, Tensor)


def loses_gradient(tensor: Tensor) -> bool:
    """Return whether a tensor is meant for a loss: computed with a gradient, and no scalar, which people only log."""
    return tensor.requires_grad and not tensor.is_leaf and tensor.numel() > 1 and torch.is_grad_enabled()


def flat_bytes(tensor: Tensor) -> Tensor:
    """View a dense tensor as bytes, row-major: its own memory if it is contiguous."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    if has_no_memory(plain):
        plain = plain.clone()
    flat = plain.contiguous().reshape(-1)
    if flat.stride() != (1,):  # one element, or none, is contiguous whatever its stride
        flat = flat.as_strided(flat.shape, (1,))
    return flat.view(torch.uint8)


def concatenate(tensors: list[Tensor]) -> Tensor:
    """Join tensors of one dtype, always in new memory. Under autocast, plain `torch.cat` refuses float64."""
    first = tensors[0]
    length = sum([tensor.size(0) for tensor in tensors])  # len(tensor) is Python code of torch's
    out = torch.empty((length, *first.shape[1:]), dtype=first.dtype, device=first.device)
    return torch.cat(tensors, out=out)


def name_dtype(dtype: torch.dtype) -> str:
    """Write a dtype without its module: `float32`."""
    return str(dtype).removeprefix("torch.")


def bytes_as_tensor(data: bytes) -> Tensor:
    """Copy bytes into a tensor."""
    return torch.from_numpy(np.frombuffer(data, np.uint8).copy())
