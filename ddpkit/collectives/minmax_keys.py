"""Turn values into int64 keys in the order of the values, for minima and maxima. Nothing here talks to other ranks.

Ranks take the greatest key. So keys are greater for greater values, or for "min" for lesser ones, and greatest for NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

_GREATEST = 2**63 - 1
_LEAST = -(2**63)
_BOOL, _INT, _FLOAT = 0, 1, 2


def tensor_keys(flat: Tensor, op: str) -> Tensor:
    """Turn a tensor of any real dtype into keys."""
    if flat.dtype.is_floating_point:
        bits = flat.to(torch.float64).view(torch.int64)
        return torch.where(flat.isnan(), _GREATEST, _order_bits(bits) ^ _flip(op))
    if flat.dtype == torch.uint64:
        return flat.view(torch.int64) ^ _LEAST ^ _flip(op)
    return flat.to(torch.int64) ^ _flip(op)


def tensor_from_keys(keys: Tensor, dtype: torch.dtype, op: str) -> Tensor:
    """Turn keys back into a tensor of `dtype`."""
    keys = keys ^ _flip(op)
    if dtype.is_floating_point:
        return _order_bits(keys).view(torch.float64).to(dtype)
    if dtype == torch.uint64:
        return (keys ^ _LEAST).view(torch.uint64)
    return keys.to(dtype)


def number_keys(numbers: list[float], op: str) -> list[int]:
    """Turn Python numbers into three keys each: as a float, as an int (the least key if it is none), and its type."""
    floats = torch.tensor(numbers, dtype=torch.float64, device="cpu")
    int_keys = [_int_key(number, op) for number in numbers]
    types = [_type_key(number) for number in numbers]
    return [*tensor_keys(floats, op).tolist(), *int_keys, *types]


def numbers_from_keys(keys: list[int], op: str) -> list[float]:
    """Turn keys back into Python numbers. The result is an int where all ranks had ints, a bool where all had bools."""
    count = len(keys) // 3
    float_keys = torch.tensor(keys[:count], dtype=torch.int64, device="cpu")
    floats = tensor_from_keys(float_keys, torch.float64, op).tolist()
    int_keys = keys[count : 2 * count]
    types = keys[2 * count :]
    numbers: list[float] = []
    for number, int_key, type_key in zip(floats, int_keys, types, strict=True):
        integer = int_key ^ _flip(op)
        if type_key == _FLOAT:
            numbers.append(number)
        elif type_key == _INT:
            numbers.append(integer)
        else:
            numbers.append(bool(integer))
    return numbers


def _flip(op: str) -> int:
    """Return the mask that reverses the order of keys for "min", without the overflow of a minus sign."""
    return -1 if op == "min" else 0


def _order_bits(bits: Tensor) -> Tensor:
    """Turn the bits of a float64 into an int64 of the same order, and back."""
    return bits ^ ((bits >> 63) & _GREATEST)


def _int_key(number: float, op: str) -> int:
    if not isinstance(number, int):
        return _LEAST
    return number ^ _flip(op)


def _type_key(number: float) -> int:
    if isinstance(number, bool):
        return _BOOL
    if isinstance(number, int):
        return _INT
    return _FLOAT
