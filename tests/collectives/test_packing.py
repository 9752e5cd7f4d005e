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

INTS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32]
HALVES = {torch.float16: (11, -24), torch.bfloat16: (8, -133)}  # significant bits, exponent of the smallest number


def unit(x: Fraction, dtype: torch.dtype) -> Fraction:
    """The distance between the numbers of a half precision around x."""
    bits, least = HALVES[dtype]
    exponent = math.floor(math.log2(abs(x))) + 1 - bits if x else least
    return Fraction(2) ** max(exponent, least)


def reduced(each: list[list[Any]], op: str, is_inline: bool = True, weights: Any = None) -> Any:
    """What ranks that hold these leaves of one dtype would get."""
    dtype = each[0][0].dtype if isinstance(each[0][0], Tensor) else None
    factor, divisor = packing.normalise(len(each)) if op == "mean" else (1.0, 1.0)
    divisor = sum(weights) if weights else divisor
    shapes = [tuple(leaf.shape) if dtype else () for leaf in each[0]]
    group = packing._Group(op, "cpu", dtype, list(range(len(shapes))), shapes, list(map(math.prod, shapes)))
    factors = weights or [factor] * len(each)
    if op in packing._EXTREMES or not is_inline or (op == "sum" and dtype == torch.int64):
        buffers = [packing._scale(group.pack(own), by) for own, by in zip(each, factors, strict=True)]
        total = reduce({"min": torch.minimum, "max": torch.maximum}.get(op, torch.add), buffers)
        return group.unpack(total, each[0], divisor)
    rows = [packing._pack_inline(own, [group], by) for own, by in zip(each, factors, strict=True)]
    with np.errstate(over="ignore", invalid="ignore"):
        sums = reduce(np.add, rows)
    return group.unpack(torch.from_numpy(sums), each[0], divisor)


@given(st.data(), st.sampled_from(INTS), st.integers(1, 9))
def test_integers_are_added_and_compared_exactly(data: Any, dtype: torch.dtype, world: int) -> None:
    info = torch.iinfo(dtype)
    values = data.draw(st.lists(st.integers(info.min, info.max), min_size=world, max_size=world))
    each = [[torch.tensor([value], dtype=dtype)] for value in values]
    (mean,) = reduced(each, "mean")
    rounding = 0 if sum(map(abs, values)) <= 2**53 else 2.0**-50 * sum(map(abs, values))
    assert abs(Fraction(mean.item()) - Fraction(float(Fraction(sum(values), world)))) <= rounding
    assert mean.dtype == torch.float64
    for op, best in (("min", min), ("max", max)):
        (found,) = reduced(each, op)
        assert found.tolist() == [best(values)] and found.dtype == dtype
    (total,) = reduced(each, "sum")
    assert total.tolist() == [(sum(values) + 2**63) % 2**64 - 2**63] and total.dtype == torch.int64  # as torch adds


@given(st.data(), st.sampled_from(list(HALVES)), st.integers(1, 9))
def test_halves_are_averaged_to_half_a_unit(data: Any, dtype: torch.dtype, world: int) -> None:
    raw = st.integers(-(2**15), 2**15 - 1).map(lambda bits: torch.tensor([bits], dtype=torch.int16).view(dtype))
    moderate = raw.filter(lambda x: 2**-24 <= abs(x.item()) < 2**17)  # of which float64 sums are exact
    each = data.draw(st.lists(moderate, min_size=world, max_size=world))
    mean = sum((Fraction(x.item()) for x in each), Fraction(0)) / world
    (got,) = reduced([[x] for x in each], "mean")
    by_way_of_float32 = Fraction(1, 2**12)  # torch rounds to single precision first
    assert abs(Fraction(got.item()) - mean) <= unit(mean, dtype) * (Fraction(1, 2) + by_way_of_float32)
    assert got.dtype == dtype


@given(st.lists(st.floats(), min_size=1, max_size=9), st.sampled_from([torch.float64, torch.float32, torch.float16]))
def test_extremes_of_floats_are_those_of_numpy_and_nan_wins(values: list[float], dtype: torch.dtype) -> None:
    each = [torch.tensor([value], dtype=torch.float64).to(dtype) for value in values]
    with np.errstate(invalid="ignore"):
        columns = torch.stack(each).numpy()
        for op, reference in (("min", np.min), ("max", np.max)):
            (found,) = reduced([[x] for x in each], op)
            np.testing.assert_array_equal(found.numpy(), reference(columns, axis=0))


numbers = st.one_of(st.booleans(), st.integers(-(2**49), 2**49), st.floats(allow_nan=False, allow_infinity=False))


@given(st.lists(numbers, min_size=1, max_size=9))
@example([2**49, -(2**49), True])
@example([False, False, False, 2.2250738585e-313])
@example([2.225073858507e-311] * 3)
@example([1e308, -7.976931348623158e307])
def test_python_numbers_follow_python(values: list[Any]) -> None:
    each = [[value] for value in values]
    exact = sum(Fraction(value) for value in values)
    all_ints = all(isinstance(value, int) for value in values)
    for op, reference in (("min", min), ("max", max)):
        (got,) = reduced(each, op)
        assert got == (reference(values) if all_ints else reference(map(float, values)))
        kind = bool if all(isinstance(value, bool) for value in values) else int
        assert type(got) is (kind if all_ints else float)
    (total,), (mean,) = reduced(each, "sum"), reduced(each, "mean")
    assert type(mean) is float
    if all_ints:
        assert total == exact and type(total) is int
    magnitude = sum(abs(Fraction(value)) for value in values)
    size = float(magnitude) if magnitude < 1e308 else math.inf
    assert type(total) is (int if all_ints else float)
    rounding = 1e-14 * size + len(values) ** 2 * math.ulp(0.0)  # ranks add their shares of a mean, rounded near zero
    assert size == math.inf or (abs(total - exact) <= rounding and abs(mean * len(values) - exact) <= rounding)


def test_a_number_that_is_nan_anywhere_has_no_extreme() -> None:
    for op in ("min", "max"):
        for numbers in ([math.nan, 1.0], [2, math.nan], [math.nan, -math.inf, math.inf]):
            (got,) = reduced([[number] for number in numbers], op)
            assert math.isnan(got)


def test_minus_zero_is_kept() -> None:
    zeros = [[torch.tensor([-0.0])]] * 3
    for op in ("mean", "sum"):
        assert math.copysign(1, reduced(zeros, op)[0].item()) == -1
        assert math.copysign(1, reduced([[-0.0]] * 3, op)[0]) == -1
    assert math.copysign(1, reduced([*zeros, [torch.ones(1)]], "mean", weights=[1, 2, 3, 0])[0].item()) == -1
    assert math.copysign(1, reduced([[0], [0]], "mean")[0]) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
@pytest.mark.parametrize("is_inline", [True, False])
def test_a_weight_of_zero_silences_anything(dtype: torch.dtype, is_inline: bool) -> None:
    bad = torch.tensor([math.nan, math.inf]).to(dtype) if dtype.is_floating_point else torch.ones(2, dtype=dtype)
    each = [[torch.tensor([1, 0], dtype=dtype)], [bad], [torch.tensor([0, 1], dtype=dtype)]]
    assert reduced(each, "mean", is_inline, weights=[3.0, 0.0, 1.0])[0].tolist() == [0.75, 0.25]
