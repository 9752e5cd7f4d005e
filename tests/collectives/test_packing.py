"""The packed buffers that ranks add, here on one process, against exact arithmetic with fractions."""

from __future__ import annotations

import math
from fractions import Fraction
from functools import reduce
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from ddpkit.collectives import reduce as packing

INTS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64]
HALVES = {torch.float16: (11, -24), torch.bfloat16: (8, -133)}  # significant bits, exponent of the smallest number


def unit(x: Fraction, dtype: torch.dtype) -> Fraction:
    """The distance between the numbers of a half precision around x."""
    bits, least = HALVES[dtype]
    exponent = math.floor(math.log2(abs(x))) + 1 - bits if x else least
    return Fraction(2) ** max(exponent, least)


def over_ranks(packed: list[Tensor], op: str) -> Tensor:
    return reduce(torch.maximum if op in packing.EXTREMES else torch.add, packed)


def reduced(each: list[Tensor], op: str, wire: torch.dtype = torch.float64, weights: Any = None) -> Tensor:
    """What ranks that hold these tensors would get."""
    packed = [packing.pack(x.reshape(-1).clone(), op, wire, weights is not None) for x in each]
    for mine, weight in zip(packed, weights or [1] * len(each), strict=True):
        packing.scale(mine, weight)
    total = over_ranks(packed, op)
    in_halves = packing.is_in_halves(each[0].dtype, weights is not None)
    divisor = float(sum(weights or [1] * len(each))) if op == "mean" else 1.0
    return packing.unpack(total, each[0].dtype, op, divisor, in_halves).reshape(each[0].shape)


def reduced_numbers(each: list[list[Any]], op: str) -> list[Any]:
    kind = torch.int64 if op in packing.EXTREMES else torch.float64
    total = over_ranks(
        [torch.tensor(packing.pack_numbers(numbers, op, weighted=False), dtype=kind) for numbers in each], op
    )
    return packing.unpack_numbers(total.tolist(), op, len(each), float(len(each)) if op == "mean" else 1.0)


@given(st.data(), st.sampled_from(INTS), st.integers(1, 9))
def test_integers_are_added_averaged_and_compared_exactly(data: Any, dtype: torch.dtype, world: int) -> None:
    info = torch.iinfo(dtype)
    values = data.draw(st.lists(st.integers(info.min, info.max), min_size=world, max_size=world))
    each = [torch.tensor([value], dtype=dtype) for value in values]
    assert reduced(each, "mean").tolist() == [float(Fraction(sum(values), world))]
    assert reduced(each, "mean").dtype == torch.float64
    for op, best in (("min", min), ("max", max)):
        assert reduced(each, op).tolist() == [best(values)] and reduced(each, op).dtype == dtype
    if -(2**63) <= sum(values) < 2**63:
        assert reduced(each, "sum").tolist() == [sum(values)] and reduced(each, "sum").dtype == torch.int64
    else:
        with pytest.raises(OverflowError, match="does not fit 64 bits"):
            reduced(each, "sum")


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=8), st.sampled_from([1, 1000, 2**18 - 1]))
@example([2063716425093236682, -2008596548761560162, 663049671578551872], 1)
@example([2**53, 1], 1)  # halfway between two floats
@example([2**53 + 2, 1], 1)
def test_the_mean_of_huge_integers_is_correctly_rounded_on_up_to_two_million_ranks(values: Any, times: int) -> None:
    world = len(values) * times
    total = sum(packing.pack(torch.tensor([value]), "mean", torch.float64, False) * times for value in values)
    mean = packing.unpack(total, torch.int64, "mean", float(world), in_halves=True)
    assert mean.tolist() == [float(Fraction(sum(values) * times, world))]


@given(st.data(), st.sampled_from(list(HALVES)), st.integers(1, 9))
def test_halves_are_averaged_to_half_a_unit(data: Any, dtype: torch.dtype, world: int) -> None:
    raw = st.integers(-(2**15), 2**15 - 1).map(lambda bits: torch.tensor([bits], dtype=torch.int16).view(dtype))
    moderate = raw.filter(lambda x: 2**-24 <= abs(x.item()) < 2**17)  # of which float64 sums are exact
    each = data.draw(st.lists(moderate, min_size=world, max_size=world))
    mean = sum((Fraction(x.item()) for x in each), Fraction(0)) / world
    (got,) = reduced(each, "mean").tolist()
    by_way_of_float32 = Fraction(1, 2**12)  # torch rounds to single precision first
    assert abs(Fraction(got) - mean) <= unit(mean, dtype) * (Fraction(1, 2) + by_way_of_float32)
    assert reduced(each, "mean").dtype == dtype


@given(st.lists(st.floats(), min_size=1, max_size=9), st.sampled_from([torch.float64, torch.float32, torch.float16]))
def test_extremes_of_floats_are_those_of_numpy_and_nan_wins(values: list[float], dtype: torch.dtype) -> None:
    each = [torch.tensor([value], dtype=torch.float64).to(dtype) for value in values]
    with np.errstate(invalid="ignore"):
        columns = torch.stack(each).numpy()
        for op, reference in (("min", np.min), ("max", np.max)):
            np.testing.assert_array_equal(reduced(each, op).numpy(), reference(columns, axis=0))


numbers = st.one_of(st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False, allow_infinity=False))


@given(st.lists(numbers, min_size=1, max_size=9))
@example([2**53, -(2**53), True])
@example([False, False, False, 2.2250738585e-313])
@example([1e308, -7.976931348623158e307])
def test_python_numbers_follow_python(values: list[Any]) -> None:
    each = [[value] for value in values]
    exact = sum(Fraction(value) for value in values)
    for op, reference in (("min", min), ("max", max)):
        if any(isinstance(value, int) and abs(value) > 2**53 for value in values):
            with pytest.raises(OverflowError, match=r"Ints beyond 2\^53 are not compared"):
                reduced_numbers(each, op)
            continue
        (got,) = reduced_numbers(each, op)
        all_ints = all(isinstance(value, int) for value in values)
        assert got == (reference(values) if all_ints else reference(map(float, values)))
        kind = bool if all(isinstance(value, bool) for value in values) else int
        assert type(got) is (kind if all_ints else float)
    (total,), (mean,) = reduced_numbers(each, "sum"), reduced_numbers(each, "mean")
    if all(isinstance(value, int) for value in values):
        assert total == exact and type(total) is int
        assert mean == exact.numerator / (exact.denominator * len(values))
    else:
        magnitude = sum(abs(Fraction(value)) for value in values)
        size = float(magnitude) if magnitude < 1e308 else math.inf
        assert type(total) is float and type(mean) is float
        rounding = 1e-14 * size + len(values) * math.ulp(0.0)  # no mean is finer than the smallest number
        assert size == math.inf or (abs(total - exact) <= rounding and abs(mean * len(values) - exact) <= rounding)


def test_a_number_that_is_nan_anywhere_has_no_extreme() -> None:
    for op in packing.EXTREMES:
        for numbers in ([math.nan, 1.0], [2, math.nan], [math.nan, -math.inf, math.inf]):
            (got,) = reduced_numbers([[number] for number in numbers], op)
            assert math.isnan(got)


def test_minus_zero_is_kept() -> None:
    zeros = [torch.tensor([-0.0])] * 3
    for op in ("mean", "sum"):
        assert math.copysign(1, reduced(zeros, op).item()) == -1
        assert math.copysign(1, reduced_numbers([[-0.0]] * 3, op)[0]) == -1
    assert math.copysign(1, reduced([*zeros, torch.ones(1)], "mean", weights=[1, 2, 3, 0]).item()) == -1
    assert math.copysign(1, reduced_numbers([[0], [0]], "mean")[0]) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
@pytest.mark.parametrize("wire", [torch.float32, torch.float64])
def test_a_weight_of_zero_silences_anything(dtype: torch.dtype, wire: torch.dtype) -> None:
    bad = torch.tensor([math.nan, math.inf]).to(dtype) if dtype.is_floating_point else torch.ones(2, dtype=dtype)
    each = [torch.tensor([1, 0], dtype=dtype), bad, torch.tensor([0, 1], dtype=dtype)]
    assert reduced(each, "mean", wire, weights=[3.0, 0.0, 1.0]).tolist() == [0.75, 0.25]


def test_an_int_beyond_64_bits_is_refused() -> None:
    for op in ("sum", "mean"):
        with pytest.raises(OverflowError, match=f"got {2**63}. Pass it as a float"):
            packing.pack_numbers([1.0, 2**63], op, weighted=False)
