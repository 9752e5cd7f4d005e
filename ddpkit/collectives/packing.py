"""Values as lanes of floating-point numbers that ranks can add without losing a bit. Nothing here talks to other ranks.

An integer of 64 bits takes two float64 lanes, its high and its low half: a sum of halves is exact on up to two million
ranks. What is narrower, and every float, takes one. Maxima travel as int64 lanes whose order is that of the values.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .tensors import concatenate

Lanes = Tensor | NDArray[np.float64]
EXTREMES = ("min", "max")
WIDE = (torch.int64, torch.uint64)
_LOW, _TOP, _LOWEST = 2**32 - 1, 2**63 - 1, -(2**63)
_TINY = torch.finfo(torch.float32).tiny


def wire_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which large tensors of `dtype` are added."""
    return torch.float32 if dtype.is_floating_point and dtype != torch.float64 else torch.float64


def lanes_per_element(dtype: torch.dtype | None, weighted: bool) -> int:
    """How many lanes an element takes when it is added; without dtype, a Python number."""
    if dtype is None:
        return 4
    return 2 if dtype in WIDE and not weighted else 1


def pack_numbers(numbers: list[float], op: str, weighted: bool = False) -> list[float]:
    """Turn Python numbers into lanes.

    Added, four lanes: as float, whether it is an int, the high and the low half of an int. Under a weight all are
    floats. Compared, three: as float, as int (the lowest if it is none), and 0 for a bool, 1 for an int, 2 for a float.
    """
    if op in EXTREMES:
        return _pack_number_order(numbers, op)
    rest = [0.0] * (3 * len(numbers))
    if set(map(type, numbers)) <= {float}:
        return numbers + rest
    if weighted:
        return [*map(float, numbers), *rest]
    ints = _ints(numbers)
    floats = [0.0 if isinstance(x, int) else x for x in numbers]
    return [*floats, *[isinstance(x, int) for x in numbers], *[x >> 32 for x in ints], *[x & _LOW for x in ints]]


def unpack_numbers(lanes: list[float], op: str, world_size: int, divisor: float) -> list[float]:
    """Read the numbers' sums, means, minima or maxima. What was an int on every rank stays one, but for means.

    Args:
        divisor: Of the lanes that hold floats, for a mean and for a sum: it takes back the scale, too.
    """
    if op in EXTREMES:
        return _unpack_number_order(lanes, op)
    n = len(lanes) // 4
    floats = [x / divisor for x in lanes[:n]]
    if not any(lanes[n : 2 * n]):
        return floats
    each = zip(floats, *(lanes[i * n : (i + 1) * n] for i in (1, 2, 3)), strict=True)
    parts = [(f, whole, int(high) * 2**32 + int(low)) for f, whole, high, low in each]
    if op == "mean":
        return [i / world_size if whole == world_size else i / world_size + f for f, whole, i in parts]
    return [i if whole == world_size else i + f for f, whole, i in parts]


def pack(flat: Tensor, op: str, wire: torch.dtype, weighted: bool = False) -> Tensor:
    """Turn a flat tensor into lanes, which may be that tensor itself."""
    if op in EXTREMES:
        return _pack_order(flat, op)
    if weighted or flat.dtype not in WIDE:
        return flat.to(wire)
    low, high = flat.view(torch.int64) & _LOW, flat.view(torch.int64) >> 32
    return concatenate([high & _LOW if flat.dtype == torch.uint64 else high, low]).to(wire)


def scale(lanes: Lanes, factor: float) -> None:
    """Multiply lanes, in place. A factor of 0 silences NaN too: -0.0 adds nothing, not even to -0.0."""
    if isinstance(lanes, np.ndarray):
        lanes = torch.from_numpy(lanes)  # NumPy would warn of an overflow
    if not factor:
        lanes[:] = -0.0
    elif factor < _TINY and lanes.dtype == torch.float32:  # as float32 it has few digits
        lanes.copy_(lanes.to(torch.float64) * factor)
    elif factor != 1:
        lanes *= factor


def safe_scale(share: float | None, total: float) -> tuple[float, float]:
    """Choose a factor for this rank's lanes with which no sum overflows, and say what all ranks' factors add up to.

    Factors are shares times one power of two, which changes no digit, but of what is next to the smallest numbers.
    """
    fraction, exponent = math.frexp(total)
    if share is None and fraction == 0.5:  # two, four, eight ranks: the sum is 1, and nothing is left to divide by
        exponent -= 1
    return math.ldexp(1.0 if share is None else share, -exponent), math.ldexp(total, -exponent)


def unpack(lanes: Tensor, dtype: torch.dtype, op: str, divisor: float, wide: bool) -> Tensor:
    """Read the results of what had `dtype`: floats in that dtype, means of ints in float64, sums of ints in int64.

    The lanes are overwritten.
    """
    if op in EXTREMES:
        return _unpack_order(lanes, dtype, op)
    if wide:
        high, low = lanes.chunk(2)
        return _divide(high * 2.0**32 + low, divisor) if op == "mean" else _wide_sum(high, low)
    lanes = _divide(lanes, divisor)
    if dtype.is_floating_point:
        return lanes.to(dtype)
    return lanes if op == "mean" else lanes.to(torch.int64)


def _divide(lanes: Tensor, divisor: float) -> Tensor:  # by a number, CUDA multiplies with its reciprocal: rounds twice
    return lanes if divisor == 1 else lanes.div_(torch.full((), divisor, dtype=lanes.dtype, device=lanes.device))


def _wide_sum(high: Tensor, low: Tensor) -> Tensor:
    low = low.to(torch.int64)
    high = high.to(torch.int64) + (low >> 32)
    if high.numel() and bool(((high < -(2**31)) | (high >= 2**31)).any()):
        raise OverflowError("The sum of 64-bit integers over all ranks does not fit 64 bits. Reduce them as float64.")
    return (high << 32) + (low & _LOW)


def _pack_number_order(numbers: list[float], op: str) -> list[float]:
    floats = _pack_order(torch.tensor(numbers, dtype=torch.float64, device="cpu"), op).tolist()
    each = zip(numbers, _ints(numbers), strict=True)
    ints = [i ^ _flip(op) if isinstance(x, int) else _LOWEST for x, i in each]
    return [*floats, *ints, *map(_kind, numbers)]


def _unpack_number_order(lanes: list[float], op: str) -> list[float]:
    n = len(lanes) // 3
    floats = _unpack_order(torch.tensor(lanes[:n], dtype=torch.int64, device="cpu"), torch.float64, op).tolist()
    ints = [int(i) ^ _flip(op) for i in lanes[n : 2 * n]]
    results: list[float] = []
    for f, i, kind in zip(floats, ints, lanes[2 * n :], strict=True):
        whole = bool(i) if kind == 0 else i
        results.append(f if kind == 2 else whole)
    return results


def _kind(number: float) -> int:
    if isinstance(number, bool):
        return 0
    return 1 if isinstance(number, int) else 2


def _pack_order(flat: Tensor, op: str) -> Tensor:  # greater for greater elements (for "min", lesser), greatest for NaN
    if flat.dtype.is_floating_point:
        bits = flat.to(torch.float64).view(torch.int64)
        return torch.where(flat.isnan(), _TOP, _monotone(bits) ^ _flip(op))
    return (flat.view(torch.int64) ^ _LOWEST if flat.dtype == torch.uint64 else flat.to(torch.int64)) ^ _flip(op)


def _unpack_order(keys: Tensor, dtype: torch.dtype, op: str) -> Tensor:
    keys = keys ^ _flip(op)
    if dtype.is_floating_point:
        return _monotone(keys).view(torch.float64).to(dtype)
    return (keys ^ _LOWEST).view(torch.uint64) if dtype == torch.uint64 else keys.to(dtype)


def _flip(op: str) -> int:  # turns the order round without the overflow of a minus sign
    return -1 if op == "min" else 0


def _monotone(bits: Tensor) -> Tensor:  # a float64's bits to an int64 of the same order, and back
    return bits ^ ((bits >> 63) & _TOP)


def _ints(numbers: list[float]) -> list[int]:
    ints = [int(x) if isinstance(x, int) else 0 for x in numbers]
    if worst := [x for x in ints if not -(2**63) <= x < 2**63]:
        raise OverflowError(f"Ints must fit 64 bits to be combined exactly, got {worst[0]}. Pass it as a float.")
    return ints
