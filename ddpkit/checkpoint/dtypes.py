"""Saved tensors whose values another dtype cannot hold: loading would change them silently."""

from __future__ import annotations

import torch
from torch import Tensor

from ..collectives.tensors import name_dtype


def explain_loss(name: str, saved: Tensor, dtype: torch.dtype) -> str:
    """Say that loading a tensor as this dtype would change it by more than rounding; "" if not.

    Nothing is said of one on the meta device, whose values are not known yet.
    """
    if saved.dtype == dtype or saved.is_meta or _holds(dtype, saved):
        return ""
    there = name_dtype(saved.dtype)
    return f"has {name} of {there} there, of {name_dtype(dtype)} here, which does not hold its values"


def _holds(dtype: torch.dtype, saved: Tensor) -> bool:
    """Return whether a tensor keeps its values in another dtype.

    Numbers that are not integers may be rounded.
    """
    if saved.is_complex() and not dtype.is_complex:
        return False
    converted = saved.to(dtype)
    if dtype.is_complex and not saved.is_complex():
        converted = converted.real
    if _has_fractions(saved.dtype) and _has_fractions(dtype):
        return _is_rounded(converted, saved)
    if not torch.equal(converted.to(saved.dtype), saved):
        return False
    return _has_negative(converted) == _has_negative(saved)


def _has_fractions(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _is_rounded(converted: Tensor, saved: Tensor) -> bool:
    """Return whether a tensor is a saved one but for rounding, and the smallest numbers, now 0."""
    limits = torch.finfo(converted.dtype)
    if limits.max >= torch.finfo(saved.dtype).max:
        return True
    if saved.itemsize == 1:  # torch does not compare floats of 8 bits
        saved = saved.float()
    back = converted.to(saved.dtype)  # larger numbers became infinite, NaN, or the largest
    smallest = limits.smallest_normal
    return torch.allclose(back, saved, rtol=limits.eps, atol=smallest, equal_nan=True)


def _has_negative(tensor: Tensor) -> bool:
    return tensor.dtype.is_signed and bool((tensor < 0).any())
