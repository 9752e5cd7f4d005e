"""Values as lanes of floating-point numbers that ranks can add without losing a bit. Nothing here talks to other ranks.

An integer of 64 bits takes two float64 lanes, its high and its low half: a sum of halves is exact on up to two million
ranks. What is narrower, and every float, takes one. Maxima travel as int64 lanes whose order is that of the values.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

EXTREMES = ("min", "max")
WIDE = (torch.int64, torch.uint64)
_LOW, _TOP, _LOWEST = 2**32 - 1, 2**63 - 1, -(2**63)


def wire_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which large tensors of `dtype` are added."""
    return torch.float32 if dtype.is_floating_point and dtype != torch.float64 else torch.float64


def lanes_per_element(dtype: torch.dtype | None, weighted: bool) -> int:
    """How many lanes an element takes when it is added; without dtype, a Python number."""
    if dtype is None:
        return 4
    return 2 if dtype in WIDE and not weighted else 1


def pack_numbers(numbers: list[float], op: str, weight: float | None = None) -> Tensor:
    """The lanes of Python numbers.

    Added, four lanes: as float, whether it is an int, the high and the low half of an int. Under a weight all are
    floats. Compared, three: as float, as int (the lowest if it is none), whether it is a float.
    """
    if op in EXTREMES:
        return _pack_number_order(numbers, op)
    lanes = np.zeros((4, len(numbers)))
    if weight == 0:
        lanes[0] = -0.0  # adds nothing, not even to -0.0
    elif weight is not None:
        with np.errstate(over="ignore"):
            lanes[0] = np.array(numbers, np.float64) * weight
    elif set(map(type, numbers)) <= {float}:
        lanes[0] = numbers
    else:
        lanes[1] = [isinstance(x, int) for x in numbers]
        lanes[0] = [0.0 if isinstance(x, int) else x for x in numbers]
        ints = _ints(numbers)
        lanes[2], lanes[3] = ints >> 32, ints & _LOW
    return torch.from_numpy(lanes.reshape(-1))


def unpack_numbers(lanes: Tensor, op: str, divisor: float) -> list[float]:
    """The numbers' sums, means, minima or maxima. What was an int on every rank stays one, but for means."""
    if op in EXTREMES:
        return _unpack_number_order(lanes, op)
    floats, whole, high, low = lanes.numpy().reshape(4, -1)
    if not np.count_nonzero(whole):
        return (floats / divisor if op == "mean" else floats).tolist()  # type: ignore[no-any-return]
    ints = [int(h) * 2**32 + int(low) for h, low in zip(high.tolist(), low.tolist(), strict=True)]
    world_size = int(divisor)  # under a weight there are no ints here
    each = zip(ints, whole.tolist(), floats.tolist(), strict=True)
    sums = [i if w == world_size else i + f for i, w, f in each]
    return [x / world_size for x in sums] if op == "mean" else sums


def pack(flat: Tensor, op: str, wire: torch.dtype, weight: float | None = None) -> Tensor:
    """The lanes of a flat tensor, which may be that tensor itself."""
    if op in EXTREMES:
        return _pack_order(flat, op)
    if weight == 0:
        return torch.full_like(flat, -0.0, dtype=wire)
    if weight is not None:
        return flat.to(wire) * weight
    if flat.dtype not in WIDE:
        return flat.to(wire)
    low, high = flat.view(torch.int64) & _LOW, flat.view(torch.int64) >> 32
    return torch.cat([high & _LOW if flat.dtype == torch.uint64 else high, low]).to(wire)


def unpack(lanes: Tensor, dtype: torch.dtype, op: str, divisor: float, wide: bool) -> Tensor:
    """The results of what had `dtype`: floats in that dtype, means of ints in float64, sums of ints in int64."""
    if op in EXTREMES:
        return _unpack_order(lanes, dtype, op)
    if wide:
        high, low = lanes.chunk(2)
        return _wide_mean(high, low, divisor) if op == "mean" else _wide_sum(high, low)
    if op == "mean":
        lanes = _divide(lanes, divisor)
    if dtype.is_floating_point:
        return _narrow(lanes, dtype)
    return lanes if op == "mean" else lanes.to(torch.int64)


def _divide(lanes: Tensor, divisor: float) -> Tensor:  # by a number, CUDA multiplies with its reciprocal: rounds twice
    return lanes / torch.full((), divisor, dtype=lanes.dtype, device=lanes.device)


def _narrow(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x.to(dtype)`, rounded once. From float64 to half, torch rounds by way of float32, so twice.

    References:
        Boldo and Melquiond, "Emulation of a FMA and correctly rounded sums: proved algorithms using rounding to odd",
        IEEE Transactions on Computers 57(4), 2008.
    """
    if x.dtype != torch.float64 or dtype.itemsize > 2:
        return x.to(dtype)
    near = x.to(torch.float32)
    bits = near.view(torch.int32)
    bits = bits - (near.abs().to(torch.float64) > x.abs()).to(torch.int32)  # towards zero
    return (bits | (near.to(torch.float64) != x).to(torch.int32)).view(torch.float32).to(dtype)


def _wide_sum(high: Tensor, low: Tensor) -> Tensor:
    low = low.to(torch.int64)
    high = high.to(torch.int64) + (low >> 32)
    if high.numel() and bool(((high < -(2**31)) | (high >= 2**31)).any()):
        raise OverflowError("The sum of 64-bit integers over all ranks does not fit 64 bits. Reduce them as float64.")
    return (high << 32) + (low & _LOW)


def _wide_mean(high: Tensor, low: Tensor, divisor: float) -> Tensor:
    mean = _divide(high * 2.0**32 + low, divisor)
    big = high.abs() >= 2.0**20  # beyond 53 bits the sum above was rounded, and the quotient again
    if mean.numel() and bool(big.any()):
        pairs = zip(high[big].tolist(), low[big].tolist(), strict=True)
        exact = [(int(h) * 2**32 + int(low)) / int(divisor) for h, low in pairs]
        mean[big] = torch.tensor(exact, dtype=mean.dtype, device=mean.device)
    return mean


def _pack_number_order(numbers: list[float], op: str) -> Tensor:
    floats = torch.from_numpy(np.array(numbers, np.float64))
    is_int = torch.from_numpy(np.array([isinstance(x, int) for x in numbers], bool))
    ints = torch.where(is_int, torch.from_numpy(_ints(numbers)) ^ _flip(op), _LOWEST)
    return torch.cat([_pack_order(floats, op), ints, (~is_int).to(torch.int64)])


def _unpack_number_order(lanes: Tensor, op: str) -> list[float]:
    floats, ints, is_float = lanes.reshape(3, -1)
    each = zip(_unpack_order(floats, torch.float64, op).tolist(), (ints ^ _flip(op)).tolist(), is_float, strict=True)
    return [f if some else i for f, i, some in each]


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


def _ints(numbers: list[float]) -> NDArray[np.int64]:
    try:
        return np.array([x if isinstance(x, int) else 0 for x in numbers], np.int64)
    except OverflowError:
        worst = max((x for x in numbers if isinstance(x, int)), key=abs)
        raise OverflowError(
            f"An int must fit 64 bits to be combined exactly, got {worst}. Pass it as a float."
        ) from None
