"""Pack values into a buffer of numbers that ranks can add or compare, and unpack the results.

To be added, an element takes one slot of the buffer, a floating-point number. An integer of 64 bits takes two, its high
and its low half: a sum of halves is exact on up to two million ranks. To be compared, elements become int64 keys in
the order of the values. Nothing here talks to other ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .minmax_keys import number_keys, numbers_from_keys, tensor_from_keys, tensor_keys
from .tensors import concatenate

Buffer = Tensor | NDArray[np.float64]
EXTREMES = ("min", "max")
_SLOTS_PER_NUMBER = 4
_IN_HALVES = (torch.int64, torch.uint64)
_LOW_HALF = 2**32 - 1
_SMALLEST_FLOAT32 = torch.finfo(torch.float32).tiny


def slots_per_element(dtype: torch.dtype | None, weighted: bool) -> int:
    """Count the slots that an element takes when it is added; without dtype, a Python number."""
    if dtype is None:
        return _SLOTS_PER_NUMBER
    return 2 if is_in_halves(dtype, weighted) else 1


def is_in_halves(dtype: torch.dtype | None, weighted: bool) -> bool:
    """Return whether elements are added as two halves. Under a weight they are floats."""
    return dtype in _IN_HALVES and not weighted


def buffer_dtype(dtype: torch.dtype | None, op: str) -> torch.dtype:
    """Choose the dtype in which large tensors of `dtype` travel, or Python numbers."""
    if op in EXTREMES:
        return torch.int64
    if dtype is None or not dtype.is_floating_point or dtype == torch.float64:
        return torch.float64
    return torch.float32


def pack_numbers(numbers: list[float], op: str, weighted: bool) -> Sequence[float]:
    """Pack Python numbers.

    Added, they take four slots: the number if it is a float, 1 if it is an int, the high half and the low half of an
    int. Under a weight all are floats. Compared, they take three keys.
    """
    if op in EXTREMES:
        _check_ints(numbers)
        return number_keys(numbers, op)
    no_ints = [0.0] * (3 * len(numbers))
    if set(map(type, numbers)) <= {float}:
        return numbers + no_ints
    if weighted:
        return [*map(float, numbers), *no_ints]
    _check_ints(numbers)
    floats = [0.0 if isinstance(number, int) else number for number in numbers]
    ints = [number if isinstance(number, int) else 0 for number in numbers]
    are_ints = [isinstance(number, int) for number in numbers]
    highs = [integer >> 32 for integer in ints]
    lows = [integer & _LOW_HALF for integer in ints]
    return [*floats, *are_ints, *highs, *lows]


def unpack_numbers(buffer: list[Any], op: str, world_size: int, divisor: float) -> list[float]:
    """Unpack sums, means, minima or maxima of Python numbers. Sums of ints alone are ints.

    The slots that hold floats are divided by `divisor`, for a sum, too: it takes back the scale.
    """
    if op in EXTREMES:
        return numbers_from_keys(buffer, op)
    count = len(buffer) // _SLOTS_PER_NUMBER
    floats = [total / divisor for total in buffer[:count]]
    ranks_with_int = buffer[count : 2 * count]
    if not any(ranks_with_int):
        return floats
    highs = buffer[2 * count : 3 * count]
    lows = buffer[3 * count :]
    results: list[float] = []
    for from_floats, ranks, high, low in zip(floats, ranks_with_int, highs, lows, strict=True):
        result: float = int(high) * 2**32 + int(low)
        if op == "mean":
            result /= world_size
        if ranks < world_size:
            result += from_floats
        results.append(result)
    return results


def pack(flat: Tensor, op: str, dtype: torch.dtype, weighted: bool) -> Tensor:
    """Pack a flat tensor into a buffer of `dtype`, or of int64 to be compared; it may be that tensor itself."""
    if op in EXTREMES:
        return tensor_keys(flat, op)
    if not is_in_halves(flat.dtype, weighted):
        return flat.to(dtype)
    bits = flat.view(torch.int64)
    low = bits & _LOW_HALF
    high = bits >> 32
    if flat.dtype == torch.uint64:
        high = high & _LOW_HALF
    return concatenate([high, low]).to(dtype)


def unpack(buffer: Tensor, dtype: torch.dtype, op: str, divisor: float, in_halves: bool) -> Tensor:
    """Unpack the results of what had `dtype`: floats in that dtype, means of ints in float64, sums of ints in int64.

    The buffer is overwritten.
    """
    if op in EXTREMES:
        return tensor_from_keys(buffer, dtype, op)
    if in_halves:
        high, low = buffer.chunk(2)
        if op == "mean":
            return _mean_of_halves(high, low, divisor)
        return _join_halves(high, low)
    result = _divide(buffer, divisor)
    if dtype.is_floating_point:
        return result.to(dtype)
    if op == "mean":
        return result
    return result.to(torch.int64)


def scale(buffer: Buffer, factor: float) -> None:
    """Multiply a buffer, in place. A factor of 0 silences NaN too: -0.0 adds nothing, not even to -0.0."""
    if isinstance(buffer, np.ndarray):
        buffer = torch.from_numpy(buffer)  # NumPy would warn of an overflow
    if not factor:
        buffer[:] = -0.0
    elif factor < _SMALLEST_FLOAT32 and buffer.dtype == torch.float32:  # as float32 it has few digits
        buffer.copy_(buffer.to(torch.float64) * factor)
    elif factor != 1:
        buffer *= factor


def scaled(tensor: Tensor, factor: float) -> Tensor:
    """Multiply by a power of two, in new memory, also what has none of its own. By 1 no bit changes."""
    result = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    if factor == 1:
        return result.copy_(tensor)
    return torch.mul(tensor, factor, out=result)


def normalise(weight: float | None, total: float) -> tuple[float, float]:
    """Multiply this rank's weight and the total of all by one power of two, so that no weighted sum overflows.

    The total is then in [0.5, 1), or 1 if it is a power of two and no rank has a weight. No digit changes, but of what
    is next to the smallest numbers.
    """
    fraction, exponent = math.frexp(total)
    if weight is None:
        weight = 1.0
        if fraction == 0.5:  # two, four, eight ranks: with a sum of 1 nothing is left to divide by
            exponent -= 1
    return math.ldexp(weight, -exponent), math.ldexp(total, -exponent)


def _check_ints(numbers: list[float]) -> None:
    for number in numbers:
        if isinstance(number, int) and not -(2**63) <= number < 2**63:
            raise OverflowError(f"Ints must fit 64 bits to be combined exactly, got {number}. Pass it as a float.")


def _join_halves(high: Tensor, low: Tensor) -> Tensor:
    """Join the sums of high and low halves to int64."""
    low = low.to(torch.int64)
    high = high.to(torch.int64) + (low >> 32)
    too_large = (high < -(2**31)) | (high >= 2**31)
    if bool(too_large.any()):
        raise OverflowError("The sum of 64-bit integers over all ranks does not fit 64 bits. Reduce them as float64.")
    return (high << 32) + (low & _LOW_HALF)


def _mean_of_halves(high: Tensor, low: Tensor, count: float) -> Tensor:
    """Divide the sums of high and low halves, rounded once, as Python divides ints.

    What the sum and the quotient lose by rounding is exact itself, and is divided and added after them.
    """
    upper = high * 2.0**32
    total = upper + low
    rest = low - (total - upper)
    mean = _divide(total.clone(), count)
    head = mean.to(torch.float32).to(torch.float64)  # products of 24 and of 29 bits with the count are exact
    tail = mean - head
    rest += total - head * count - tail * count
    return mean + _divide(rest, count)


def _divide(buffer: Tensor, divisor: float) -> Tensor:
    """Divide in place. By a plain number, CUDA would multiply with its reciprocal, which rounds twice."""
    if divisor == 1:
        return buffer
    return buffer.div_(torch.full((), divisor, dtype=buffer.dtype, device=buffer.device))
