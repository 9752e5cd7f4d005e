"""Digests: equal for equal values, and another if anything differs."""

from __future__ import annotations

from collections import OrderedDict, deque
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch

from ddpkit.collectives.differences import digest


class Mode(Enum):
    TRAIN = 1
    EVALUATE = 2


# in each row all are different
DIFFERENT: dict[str, list[Any]] = {
    "numbers": [0, 1, 0.0, -0.0, True, 1.0, 1j, Fraction(1, 2), Decimal("0.5"), float("nan"), None, "1", b"1"],
    "numpy scalars": [np.float32(0.1), np.float32(0.2), np.float64(0.1), np.float16(0.1), np.int8(1), np.bool_(True)],
    "other scalars": [np.datetime64("2020-01-01"), np.datetime64("2020-01-02"), np.str_("a, b"), np.bytes_(b"a")],
    "arrays": [np.zeros(2), np.ones(2), np.zeros((2, 1)), np.zeros(2, np.float32), torch.zeros(2)],
    "arrays of objects": [np.array([1, "a"], object), np.array([1, "b"], object), np.array([1, None], object)],
    "tensors": [torch.zeros(2), -torch.zeros(2), torch.zeros(2, 1), torch.zeros(2).double(), torch.eye(2).to_sparse()],
    "long texts": ["a" * 1000, "a" * 1001, b"a" * 1000, bytearray(b"a" * 1000), "\ud800" * 200],
    "lists": [[], [1], [1, 2], ["1", "2"], ["1, 2"], [[1], 2], [np.str_("1"), np.str_("2")], [np.str_("1, 2")]],
    "containers": [{1: 2}, {"1": 2}, {1: "2"}, {1: [2, np.float32(3)]}, {1: [2, np.float32(4)]}, {1}, {"1"}, {1, 2}],
    "queues": [deque([1]), deque([2])],
    "others": [Mode.TRAIN, Mode.EVALUATE, torch.float32, torch.float64, torch.device("cpu"), object()],
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_differs_has_another_digest(name: str) -> None:
    for one, other in combinations(DIFFERENT[name], 2):
        assert digest(one) != digest(other), (one, other)
        assert digest({"deep": [one]}) != digest({"deep": [other]}), (one, other)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_what_is_equal_has_the_same_digest() -> None:
    reversed_array = np.arange(4, dtype=">i4")[::-1]
    for one, other in [
        (object(), object()),  # whose texts hold their addresses
        ({1: 2, "a": 3}, OrderedDict([("a", 3), (1, 2)])),
        ({"b", "a"}, frozenset(["a", "b"])),
        (reversed_array, reversed_array.copy()),
        (torch.arange(6).reshape(2, 3).T, torch.arange(6).reshape(2, 3).T.contiguous()),
        (torch.ones(2, requires_grad=True), torch.ones(2)),
        (torch.ones(1, 3)[:, 0], torch.ones(1)),
        (torch.nested.nested_tensor([torch.ones(2)]), torch.nested.nested_tensor([torch.ones(2)])),
        (torch.ones(2, 3)[:0, 0], torch.ones(0)),
        (torch.tensor([2j]).conj().imag, torch.tensor([-2.0])),
    ]:
        assert digest(one) == digest(other)
        assert len(digest([one] * 1000)) < 100
