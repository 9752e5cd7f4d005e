"""Nested values, taken apart and put together again."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from ddpkit.trees import Leaf, flatten, rebuild, walk

Point = namedtuple("Point", "x y")


@dataclass(frozen=True, slots=True)
class Frozen:
    loss: float
    points: list[Any]


@dataclass
class Strict:
    share: float
    computed: float = field(init=False, default=2.0)

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise ValueError("a share is between 0 and 1")


def spec(value: Any) -> Any:
    return flatten(value, [])


def doubled(value: Any) -> Any:
    leaves: list[Any] = []
    flatten(value, leaves)
    return rebuild(value, iter([2 * leaf for leaf in leaves]))


def test_the_order_of_keys_does_not_matter() -> None:
    leaves: tuple[list[Any], list[Any]] = ([], [])
    assert flatten({"a": 1.0, "b": [2]}, leaves[0]) == flatten({"b": [2], "a": 1.0}, leaves[1])
    assert leaves[0] == leaves[1] == [1.0, 2]


def test_a_copy_keeps_types_and_order() -> None:
    counts = defaultdict(int, {"b": 1, "a": 2})
    value = {
        "z": 1.5,
        "dicts": [OrderedDict(b=1, a=2), counts, {2: 1, 10: 2, None: 3, ("x", 1): 4}],
        "tuple": (Point(1, (2,)), Frozen(1, [True]), Strict(1.0)),
        "empty": [{}, (), []],
    }
    got = doubled(value)
    assert list(got) == list(value)
    first, second, third = got["dicts"]
    assert type(first) is OrderedDict and list(first.items()) == [("b", 2), ("a", 4)]
    assert type(second) is defaultdict and list(second.items()) == [("b", 2), ("a", 4)] and second["new"] == 0
    assert third == {2: 2, 10: 4, None: 6, ("x", 1): 8}
    point, frozen, strict = got["tuple"]
    assert point == Point(2, (4,)) and type(point) is Point and frozen == Frozen(2, [2])
    assert (strict.share, strict.computed) == (2.0, 4.0)  # a mean of valid ones, or a sum, need not be valid
    assert got["empty"] == [{}, (), []]
    assert value["dicts"][0] == OrderedDict(b=1, a=2) and "new" not in counts  # type: ignore[index]


def test_arrays_scalars_and_tensors_come_back_as_such() -> None:
    big_endian = np.arange(3, dtype=">i4")[::-1]
    read_only = np.ones(2, np.float32)
    read_only.setflags(write=False)
    value = [np.float64(1.5), np.float16(1), np.array(1), big_endian, read_only, torch.ones(2, requires_grad=True)]
    got = doubled(value)
    assert [type(x) for x in got] == [np.float64, np.float16, np.ndarray, np.ndarray, np.ndarray, torch.Tensor]
    assert [str(x.dtype) for x in got] == ["float64", "float16", "int64", "int32", "float32", "torch.float32"]
    assert got[2].shape == () and got[3].tolist() == [4, 2, 0] and got[4].tolist() == [2, 2]
    assert not got[5].requires_grad
    assert big_endian.tolist() == [2, 1, 0] and read_only.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([1.0], (1.0,)),
        ([1.0], [1.0, 1.0]),
        ({"a": 1}, {"b": 1}),
        ({1: 1}, {"1": 1}),
        ({1: 1}, {True: 1}),
        ({}, []),
        ([[], 1], [1, []]),
        (Point(1, 2), (1, 2)),
        (Strict(1), {"share": 1, "computed": 1}),
        (1.0, np.float32(1)),
        (1.0, np.array(1.0)),
        (1.0, torch.tensor(1.0)),
        (np.ones(1), torch.ones(1, dtype=torch.float64)),
        (np.float32(1), np.array(1, np.float32)),
        (torch.ones(2, 3), torch.ones(3, 2)),
        (torch.ones(2), torch.ones(2, dtype=torch.float64)),
        (torch.ones(2), torch.ones(2, device="meta")),
        (1, "1"),
    ],
)
def test_what_cannot_be_combined_has_different_specs(one: Any, other: Any) -> None:
    assert spec(one) != spec(other)
    assert [*map(str, walk(spec(one)))] != [*map(str, walk(spec(other)))]


@pytest.mark.parametrize("one, other", [(1, 2.5), (True, 0), (np.float64(1), 3), (torch.zeros(2), torch.ones(2))])
def test_what_can_be_combined_has_equal_specs(one: Any, other: Any) -> None:
    assert spec(one) == spec(other) and hash(spec(one)) == hash(spec(other))


@pytest.mark.parametrize(
    "leaf",
    [
        *("text", None, 1j, {1, 2}, b"bytes", object, Strict),
        *(np.array(["a"]), np.array([1j]), np.ma.masked_array([1.0], [True]), np.longdouble(1), np.datetime64("2024")),
        *(torch.ones(1, dtype=torch.complex64), torch.ones(1).to_sparse(), torch.ones(1, device="meta")),
    ],
)
def test_what_cannot_be_averaged_is_not_a_known_leaf(leaf: Any) -> None:
    leaves: list[Any] = []
    found = dict(walk(flatten({"ok": 1.0, "bad": [leaf]}, leaves)))
    bad = found["value['bad'][0]"]
    assert isinstance(bad, Leaf) and not bad.known
    assert leaves == [1.0]


def test_paths_read_like_python() -> None:
    value = {"b": [Point(1, {2: 0.5})], "a": Frozen(0.0, [])}
    paths = [path for path, _ in walk(spec(value))]
    assert paths == [
        "value",
        *("value['a']", "value['a'].loss", "value['a'].points"),
        *("value['b']", "value['b'][0]", "value['b'][0].x", "value['b'][0].y", "value['b'][0].y[2]"),
    ]
    assert str(spec(torch.ones(2, 3))) == "float32 tensor of shape (2, 3)"
    assert str(spec(np.ones(2))) == "float64 array of shape (2,)"
    assert str(spec({"a": 1})) == "dict of 1" and str(spec(1)) == "number"
