"""Nested values, taken apart and put together again."""

from __future__ import annotations

from collections import ChainMap, Counter, OrderedDict, UserDict, UserList, defaultdict, deque, namedtuple
from dataclasses import InitVar, dataclass, field, fields
from functools import cached_property
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ddpkit.collectives.tree import Reducible

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
    reducible = Reducible("a test", value)
    return tuple(reducible.paths), tuple(reducible.parts)


def parts_of(value: Any) -> dict[str, Any]:
    return dict(zip(*spec(value), strict=True))


def doubled(value: Any) -> Any:
    reducible = Reducible("a test", value)
    return reducible.rebuild([2 * leaf for leaf in reducible.values])


def test_the_order_of_keys_does_not_matter() -> None:
    one, other = {"a": 1.0, "b": [2]}, {"b": [2], "a": 1.0}
    assert spec(one) == spec(other)
    assert Reducible("a test", one).values == Reducible("a test", other).values == [1.0, 2]


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
    ],
)
def test_what_cannot_be_combined_has_different_specs(one: Any, other: Any) -> None:
    assert spec(one) != spec(other)
    assert {path: str(part) for path, part in parts_of(one).items()} != {
        path: str(part) for path, part in parts_of(other).items()
    }


@pytest.mark.parametrize("one, other", [(1, 2.5), (True, 0), (np.float64(1), 3), (torch.zeros(2), torch.ones(2))])
def test_what_can_be_combined_has_equal_specs(one: Any, other: Any) -> None:
    assert spec(one) == spec(other) and hash(spec(one)) == hash(spec(other))


@pytest.mark.parametrize(
    "leaf",
    [
        *("text", None, 1j, {1, 2}, b"bytes", object, Strict, (leaf for leaf in "a")),
        *(np.array(["a"]), np.array([1j]), np.ma.masked_array([1.0], [True]), np.longdouble(1), np.datetime64("2024")),
        *(torch.ones(1, dtype=torch.complex64), torch.ones(1).to_sparse(), torch.ones(1, device="meta")),
    ],
)
def test_what_cannot_be_averaged_is_refused(leaf: Any) -> None:
    with pytest.raises(TypeError, match=r"found .* at value\['bad'\]\[0\]\."):
        Reducible("a test", {"ok": 1.0, "bad": [leaf]})


def test_paths_read_like_python() -> None:
    value = {"b": [Point(1, {2: 0.5})], "a": Frozen(0.0, [])}
    paths = list(Reducible("a test", value).paths)
    assert paths == [
        "value",
        *("value['a']", "value['a'].loss", "value['a'].points"),
        *("value['b']", "value['b'][0]", "value['b'][0].x", "value['b'][0].y", "value['b'][0].y[2]"),
    ]
    assert str(parts_of(torch.ones(2, 3))["value"]) == "float32 tensor of shape (2, 3)"
    assert str(parts_of(np.ones(2))["value"]) == "float64 array of shape (2,)"
    assert str(parts_of({"a": 1})["value"]) == "dict of 1" and str(parts_of(1)["value"]) == "number"


# --- the containers that people pass ----------------------------------------------------------------------------------


class Mirror(dict[str, Any]):
    """Like easydict: attributes mirror keys, and dicts within become Mirrors."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__()
        for key, value in values.items():
            setattr(self, key, value)

    def __setattr__(self, key: str, value: Any) -> None:
        value = Mirror(value) if type(value) is dict else value
        super().__setattr__(key, value)
        super().__setitem__(key, value)


class SelfDict(dict[str, Any]):
    """The usual recipe for a dict with attributes."""

    def __init__(self, *args: Any, **values: Any) -> None:
        super().__init__(*args, **values)
        self.__dict__ = self


@dataclass
class Output(OrderedDict[str, Any]):
    """Like the outputs of transformers' models: keys for the fields that are not None."""

    loss: Any = None
    logits: Any = None

    def __post_init__(self) -> None:
        for each in fields(self):
            if getattr(self, each.name) is not None:
                self[each.name] = getattr(self, each.name)


class Labelled(dict[str, float]):
    def __init__(self, values: dict[str, float], total: float) -> None:
        super().__init__(values)
        self.total = total


class Strings(dict[str, float]):
    """Takes other arguments than dict."""

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self[f"{prefix}/loss"] = 1.0


class Scores(list[float]):
    def __init__(self, first: float, second: float) -> None:
        super().__init__([first, second])


class Backwards(namedtuple("Backwards", "x y")):
    __slots__ = ()

    def __iter__(self) -> Any:
        return reversed(tuple(super().__iter__()))


class Fixed(namedtuple("Fixed", "x y")):
    __slots__ = ()

    def __new__(cls, x: float) -> Fixed:
        return super().__new__(cls, x, 2 * x)


class Typed(NamedTuple):
    x: float
    y: float = 5.0


@dataclass
class Base:
    first: float
    scale: InitVar[float] = 1.0
    made: list[float] = field(default_factory=list, init=False)

    def __post_init__(self, scale: float) -> None:
        self.made = [scale * self.first]


@dataclass
class Derived(Base):
    second: float = 3.0

    @cached_property
    def total(self) -> float:
        return self.first + self.second


@dataclass
class Unset:
    x: float
    y: float = field(init=False)


@dataclass
class Sneaky:
    x: float

    def __post_init__(self) -> None:
        self.twice = 2 * self.x


class Meters(int):
    pass


class Tagged(Tensor):
    """A tensor with a name for its type, as MONAI and torchvision have them."""


class Wrapped(Tensor):
    """A tensor whose own storage says nothing about its values."""

    @staticmethod
    def __new__(cls) -> Wrapped:
        return Tensor._make_wrapper_subclass(cls, (3,), dtype=torch.float32)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return torch.ones(3)


def test_a_counter_is_not_counted_again() -> None:
    got = doubled(Counter(a=3, b=1))
    assert type(got) is Counter and got == {"a": 6, "b": 2} and got["c"] == 0


def test_dicts_with_attributes_for_keys_come_back_as_they_are() -> None:
    mirror = Mirror({"loss": 1.0, "deep": {"f1": 2.0}})
    got = doubled(mirror)
    assert type(got) is type(got.deep) is Mirror
    assert (got.loss, got["loss"], got.deep.f1, got["deep"]["f1"]) == (2.0, 2.0, 4.0, 4.0)
    assert got.deep is got["deep"] and mirror.deep.f1 == 2.0
    own = doubled(SelfDict(loss=1.0))
    assert type(own) is SelfDict and own.loss == own["loss"] == 2.0
    output = doubled(Output(loss=1.0))
    assert type(output) is Output and dict(output) == {"loss": 2.0} and (output.loss, output.logits) == (2.0, None)
    with pytest.raises(TypeError, match=r"Cannot create a Strings from a dict: pass dict\(it\)"):
        doubled(Strings("train"))


def test_tuples_with_constructors_of_their_own_come_back_as_they_are() -> None:
    fixed, typed, backwards = doubled([Fixed(1.0), Typed(1.0), Backwards(1.0, 2.0)])
    assert type(backwards) is Backwards and (backwards.x, backwards.y) == (2.0, 4.0)
    assert type(fixed) is Fixed and fixed == (2.0, 4.0)
    assert type(typed) is Typed and typed == (2.0, 10.0)
    found = doubled(torch.max(torch.tensor([[1, 3], [4, 2]]), dim=0))
    assert type(found) is torch.return_types.max
    assert found.values.tolist() == [8, 6] and found.indices.tolist() == [2, 0]


def test_objects_made_of_fields_come_back_as_they_are() -> None:
    derived = Derived(1.0, scale=2.0)
    assert derived.total == 4.0  # now cached
    got = doubled(derived)
    assert type(got) is Derived and (got.first, got.made, got.second) == (2.0, [4.0], 6.0)
    assert got.total == 8.0 and derived.made == [2.0]
    with pytest.raises(TypeError, match=r"object of type NoneType at value\.y"):
        Reducible("a test", Unset(1.0))
    sneaky = doubled(Sneaky(1.0))
    assert sneaky.x == 2.0 and not hasattr(sneaky, "twice")  # rather than an old one


def test_numbers_come_back_as_plain_ones() -> None:
    assert [type(x) for x in doubled([Meters(3), np.float64(1), True])] == [int, np.float64, int]


def test_tensors_with_a_name_for_their_type_come_back_plain() -> None:
    values = [nn.Parameter(torch.ones(2)), nn.Buffer(torch.ones(2)), torch.ones(2).as_subclass(Tagged)]
    assert [type(x) for x in doubled(values)] == [Tensor] * 3


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: Labelled({"a": 1.0}, 5.0), r"object of type Labelled \(pass dict\(it\)\)"),
        (lambda: Scores(1.0, 2.0), r"object of type Scores \(pass list\(it\)\)"),
        (lambda: UserDict(loss=1.0), "object of type UserDict"),
        (lambda: UserList([1.0]), "object of type UserList"),
        (lambda: SimpleNamespace(loss=1.0), "object of type SimpleNamespace"),
        (lambda: MappingProxyType({"a": 1.0}), "object of type mappingproxy"),
        (lambda: ChainMap({"a": 1.0}), "object of type ChainMap"),
        (lambda: deque([1.0]), "object of type deque"),
        (lambda: range(3), "object of type range"),
        (lambda: {1.0}, "object of type set"),
        (lambda: torch.Size([1, 2]), "object of type Size"),
        (lambda: np.matrix([[1.0]]), r"matrix"),
        (lambda: np.rec.array([(1.0,)], dtype=[("x", "f4")]), r"recarray"),
        (lambda: np.array([object()]), r"ndarray of object"),
        (lambda: np.zeros(2, dtype=[("x", "f4")]), r"ndarray of \[\('x', '<f4'\)\]"),
        (lambda: Wrapped(), r"Wrapped"),
        (lambda: torch.ones(2, dtype=torch.complex64), r"complex64 tensor \(pass torch.view_as_real\(it\)\)"),
        (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), r"qint8 tensor"),
        (lambda: torch.nested.nested_tensor([torch.ones(2)]), r"nested"),
        (lambda: torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged), r"[Nn]ested"),
        (lambda: nn.UninitializedParameter(), r"UninitializedParameter"),
        (lambda: FakeTensorMode().from_tensor(torch.ones(2)), r"FakeTensor"),
        (lambda: torch.eye(3).to_sparse_csr(), r"sparse_csr"),
        (lambda: torch.ones(2).to(torch.float8_e4m3fn), r"float8_e4m3fn tensor"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_what_would_come_back_wrong_is_refused_with_its_path(make: Any, words: str) -> None:
    with pytest.raises(TypeError, match=rf"found .*{words}.* at value\['bad'\]\[0\]\."):
        Reducible("a test", {"ok": 1.0, "bad": [make()]})


class Same:
    def __init__(self, n: int) -> None:
        self.n = n

    def __repr__(self) -> str:
        return "Same()"


def test_keys_that_print_alike_have_no_order_that_ranks_share() -> None:
    with pytest.raises(TypeError, match=r"two keys.*Same\(\)"):
        Reducible("a test", {Same(1): 1.0, Same(2): 2.0})


def test_no_result_shares_memory_with_its_input() -> None:
    array = np.ones(3)
    reducible = Reducible("a test", [array, array[None], np.float32(1)])
    reducible.values[0] += 1
    assert array.tolist() == [1.0] * 3
