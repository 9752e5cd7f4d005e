"""Exact sums, against fractions: in any order, in any division, of numbers of any size."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from ddpkit.exact.gradients import _CHUNK, MOST, PLACES, ExactSum

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
LARGEST, LEAST = 3.4028234663852886e38, 1.401298464324817e-45  # of float32


def new_sum(elements: int = 1) -> ExactSum:
    return ExactSum(elements, torch.device("cpu"))


def total_of(parts: list[list[float]]) -> ExactSum:
    """Add up each part by itself, as a rank does, and then the parts."""
    sums = []
    for part in parts:
        sums.append(new_sum())
        for number in part:
            sums[-1].add(torch.tensor([number]))
    highest = max(each.place for each in sums)
    for each in sums:
        each.raise_to(highest)
    sums[0].digits = torch.stack([each.digits for each in sums]).sum(0)
    return sums[0]


def unit_below(largest: float) -> Fraction:
    """The unit to which numbers are rounded: 40 to 80 bits below the largest."""
    exponent = -4 * 40 - 68
    while largest >= Fraction(2) ** (exponent + 79):
        exponent += 40
    return Fraction(2) ** exponent


def exact(total: ExactSum) -> Fraction:
    upper, lower = total.digits
    return (Fraction(upper.item()) * 2**40 + Fraction(lower.item())) * Fraction(2) ** (40 * total.place - 68)


@given(st.lists(FLOATS, min_size=1, max_size=12), st.randoms(use_true_random=False))
@example([LARGEST, LEAST, -LARGEST], None)
@example([2.0**11, 2.0**-2, 2.0**-29, 2.0**-29], None)  # a place's limit, and halves of a unit
@example([2.0**-42, 1.0, 2.0**41], None)  # the place rises twice
@example([0.0, 2.0**-42], None)
@example([LEAST, 2.0**100], None)
@example([-0.0, -0.0], None)
def test_a_sum_is_that_of_rounded_fractions_in_any_order_and_division(numbers: list[float], source: object) -> None:
    unit = unit_below(max(map(abs, numbers)))
    expected = sum(round(Fraction(number) / unit) * unit for number in numbers)
    bits = set()
    for _ in range(4):
        parts: list[list[float]] = [[], [], []]
        for i, number in enumerate(numbers):
            which = i % 3 if source is None else source.randrange(3)
            parts[which].append(number)
        total = total_of(parts)
        assert exact(total) == expected
        value = total.rounded().item()
        assert value == float(expected)  # Python rounds a fraction once, too
        bits.add(np.float64(value).tobytes())
        numbers = numbers[1:] + numbers[:1]
        if source is not None:
            source.shuffle(numbers)
    assert len(bits) == 1


@given(st.lists(st.floats(-1.0, 1.0, width=32).filter(lambda x: x == 0 or abs(x) > 2.0**-16), min_size=1, max_size=50))
def test_numbers_of_like_size_add_up_as_fsum_adds_them(numbers: list[float]) -> None:
    assert total_of([numbers]).rounded().item() == math.fsum(numbers)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_each_dtype_and_length_is_added_element_by_element(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(5, _CHUNK + 3, generator=generator, dtype=torch.float64).to(dtype)
    one, other = new_sum(_CHUNK + 3), new_sum(_CHUNK + 3)
    for i in range(5):
        one.add(vectors[i])
        other.add(vectors[(i + 3) % 5])
    found = one.rounded()
    assert torch.equal(found, other.rounded())
    expected = [math.fsum(column) for column in vectors[:, -2:].T.tolist()]
    assert found[-2:].tolist() == pytest.approx(expected, abs=2.0**-50)


def test_as_many_vectors_as_are_allowed_add_up_exactly() -> None:
    largest = math.nextafter(2.0**11, 0)  # all bits of a digit, beside the limit of its place
    total = new_sum()
    total.add(torch.tensor([largest], dtype=torch.float64))
    once = exact(total)
    total.digits.mul_(MOST - 1)
    total.add(torch.tensor([largest], dtype=torch.float64))
    assert exact(total) == MOST * once


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e300])
@pytest.mark.parametrize("later", [1.0, 1e30])
def test_a_number_that_is_not_finite_spoils_its_element_alone(bad: float, later: float) -> None:
    bits = set()
    for order in [[0, 1, 2], [2, 1, 0], [1, 0, 2]]:
        vectors = torch.tensor([[1.0, 1.0], [bad, 1.0], [1.0, later]], dtype=torch.float64)
        total = new_sum(2)
        for i in order:
            total.add(vectors[i])
        total.raise_to(PLACES[-1] if later == 1.0 else total.place)
        value = total.rounded()
        bits.add(value.numpy().tobytes())
        assert math.isnan(value[0])
        assert not math.isnan(value[1])
    assert len(bits) == 1
