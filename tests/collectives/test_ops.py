"""Collectives on real ranks, against NumPy, fractions, and the same computation on one process."""

from __future__ import annotations

import math
import pickle
import re
import time
import warnings
import zlib
from collections import Counter, OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import on_ranks
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from test_tree import Derived, Fixed, Labelled, Mirror, Output

from ddpkit import (
    NotSetUpError,
    all_gather,
    all_gather_object,
    all_reduce,
    all_reduce_mean,
    broadcast,
    gather_exact,
    get_rank,
    get_world_size,
)

Point = namedtuple("Point", "x y")


@dataclass(frozen=True)
class Metrics:
    loss: Any
    counts: Any


# --- any value, any op: a property test that runs on all ranks in step ------------------------------------------------

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INTS = (torch.bool, torch.uint8, torch.int32, torch.int64)
SHAPES = ((), (1,), (0,), (3,), (2, 3), (3, 0, 2), (11, 50))  # the last does not fit the block


@cache
def elements(dtype: torch.dtype) -> st.SearchStrategy[Any]:
    if dtype == torch.bool:
        return st.booleans()
    if dtype in INTS:
        info = torch.iinfo(dtype)
        return st.integers(info.min // 4, info.max // 4)  # so that the sum over ranks fits 64 bits
    special = st.sampled_from([0.0, -0.0, math.inf, -math.inf, math.nan])
    return (
        st.floats(-20000, 20000, width=16)  # so that the sum over three ranks fits, too
        if dtype in (torch.float16, torch.bfloat16)
        else st.floats(-1e30, 1e30) | special
    )


@st.composite
def arrays(draw: Any, world: int) -> list[Any]:
    """One leaf for each rank: tensors, arrays or NumPy scalars of one dtype and shape."""
    kind = draw(st.sampled_from(["tensor", "array", "scalar"]))
    dtype = draw(st.sampled_from([*FLOATS, *INTS]))
    dtype = torch.float32 if kind != "tensor" and dtype == torch.bfloat16 else dtype
    shape = () if kind == "scalar" else draw(st.sampled_from(SHAPES))
    size = min(math.prod(shape), 6)
    each = [
        torch.tensor(draw(st.lists(elements(dtype), min_size=size, max_size=size)), dtype=dtype) for _ in range(world)
    ]
    each = [x.repeat(math.prod(shape) // max(size, 1) + 1)[: math.prod(shape)].reshape(shape) for x in each]
    if kind != "tensor":
        return [x.numpy() if kind == "array" else x.numpy()[()] for x in each]
    if draw(st.booleans()):  # non-contiguous
        each = [torch.stack([x, x], -1)[..., 0] for x in each]
    return [x.requires_grad_() if dtype.is_floating_point and draw(st.booleans()) else x for x in each]


@cache  # hypothesis checks every strategy that is made
def values(world: int, largest: int) -> st.SearchStrategy[list[Any]]:
    """One value for each rank, all of one structure; dicts in an order of their own."""
    number = st.one_of(st.booleans(), st.integers(-largest, largest), st.floats(-1e300, 1e300), st.just(math.nan))
    numbers = st.lists(number, min_size=world, max_size=world)

    def dicts(inner: list[list[Any]]) -> list[Any]:
        keys = [f"key {i}" for i in range(len(inner))]
        each = [dict(zip(keys, column, strict=True)) for column in zip(*inner, strict=True)] or [{}] * world
        return [OrderedDict(reversed(one.items())) if rank == 1 else one for rank, one in enumerate(each)]

    def nest(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        some, two = st.lists(inner, max_size=4), st.tuples(inner, inner)
        return st.one_of(
            some.map(dicts),
            some.map(lambda each: [list(column) for column in zip(*each, strict=True)] or [[]] * world),
            two.map(lambda pair: [Point(*column) for column in zip(*pair, strict=True)]),
            two.map(lambda pair: [Metrics(*column) for column in zip(*pair, strict=True)]),
        )

    return st.recursive(numbers | arrays(world), nest, max_leaves=8)


@st.composite
def cases(draw: Any, world: int) -> tuple[list[Any], str, list[Any]]:
    op = draw(st.sampled_from(["mean", "mean", "sum", "min", "max"]))
    each = draw(values(world, 2**61 if op == "mean" else 2**53 // world))
    weights = (
        draw(st.lists(st.integers(0, 5), min_size=world, max_size=world))
        if op == "mean" and draw(st.booleans())
        else []
    )
    return each, op, weights if any(weights) else [None] * world


def children(value: Any) -> list[tuple[Any, Any]] | None:
    """Keys and children in the value's own order; None for a leaf."""
    if isinstance(value, Metrics):
        return [("loss", value.loss), ("counts", value.counts)]
    if isinstance(value, (list, tuple)):
        return list(enumerate(value))
    return list(value.items()) if isinstance(value, dict) else None


def leaves_of(value: Any, path: str = "") -> dict[str, Any]:
    if (inner := children(value)) is None:
        return {path: value}
    return {name: leaf for key, child in inner for name, leaf in leaves_of(child, f"{path}/{key}").items()}


def shape_of(value: Any) -> Any:
    """Its containers' types, keys and order."""
    inner = children(value)
    return None if inner is None else (type(value), [(key, shape_of(child)) for key, child in inner])


def silenced(value: Any) -> Any:
    """What a rank of weight 0 may hold: NaN wherever there is a float."""
    if isinstance(value, dict):
        return type(value)((key, silenced(child)) for key, child in value.items())
    if isinstance(value, float):
        return type(value)(math.nan)
    if isinstance(value, torch.Tensor) and value.dtype.is_floating_point:
        return torch.full_like(value, math.nan)
    return [silenced(child) for child in value] if type(value) is list else value


def kind_of(x: Any) -> type | None:
    return next((kind for kind in (torch.Tensor, np.ndarray, np.generic) if isinstance(x, kind)), None)


def dtype_of(x: Any) -> torch.dtype:
    return x.dtype if isinstance(x, torch.Tensor) else torch.from_numpy(np.asarray(x)).dtype


def flat(x: Any) -> list[Any]:
    if isinstance(x, torch.Tensor):
        return x.detach().reshape(-1).tolist()
    return np.asarray(x).reshape(-1).tolist() if kind_of(x) else [x]


def reference(column: tuple[Any, ...], op: str, weights: list[Any]) -> tuple[Any, Fraction]:
    """The result for one element by the textbook, and the size that rounding is relative to."""
    shares = [1 if weight is None else weight for weight in weights]
    used = [(x, w) for x, w in zip(column, shares, strict=True) if w]
    if op in ("min", "max"):
        nan = [x for x, _ in used if x != x]
        return (nan[0] if nan else (min if op == "min" else max)(column)), Fraction(0)
    finite = all(math.isfinite(x) for x, _ in used)
    terms = [(Fraction(x) if finite else float(x)) * w for x, w in used]
    return sum(terms) / (sum(shares) if op == "mean" else 1), sum(map(abs, terms)) if finite else Fraction(0)


def check_leaf(got: Any, each: list[Any], own: Any, op: str, weights: list[Any]) -> None:
    rounding = Fraction(4e-16)
    if kind_of(own) is None:
        ints = all(isinstance(x, int) for x in each)
        kind = bool if op in ("min", "max") and all(isinstance(x, bool) for x in each) else int
        assert type(got) is (kind if ints and op != "mean" else float)
    else:
        dtype = dtype_of(own)
        ints = not dtype.is_floating_point
        assert kind_of(got) == kind_of(own) and got.shape == own.shape
        assert dtype_of(got) == (
            dtype if not ints or op in ("min", "max") else {"mean": torch.float64, "sum": torch.int64}[op]
        )
        assert not isinstance(got, torch.Tensor) or not got.requires_grad
        rounding = Fraction(torch.finfo(dtype).eps) if not ints else rounding
    for x, *column in zip(flat(got), *map(flat, each), strict=True):
        expected, size = reference(tuple(column), op, weights)
        if not math.isfinite(expected):
            assert x == expected or (x != x and expected != expected)
        elif op in ("min", "max"):
            assert x == (expected if ints else float(expected))
        elif ints and weights[0] is None and op == "sum":
            assert x == expected
        elif ints and weights[0] is None and size <= 2**53:
            assert x == expected.numerator / expected.denominator
        else:
            assert abs(Fraction(x) - expected) <= 2 * rounding * size + Fraction(1e-7 if rounding > 1e-4 else 0)


def check_case(case: tuple[list[Any], str, list[Any]], rank: int) -> list[Any]:
    each, op, weights = case
    value = silenced(each[rank]) if weights[rank] == 0 else each[rank]
    before = pickle.dumps(value)
    got = all_reduce_mean(value, weights[rank]) if op == "mean" else all_reduce(value, op)
    assert pickle.dumps(value) == before, "the input was changed"
    assert shape_of(got) == shape_of(value)
    columns = [leaves_of(one) for one in each]
    for path, leaf in leaves_of(got).items():
        check_leaf(leaf, [column[path] for column in columns], columns[rank][path], op, weights)
    return [flat(leaf) for _, leaf in sorted(leaves_of(got).items())]


# the greatest is the largest int that is compared, and a float among the numbers makes the result one
MIXED = [False, 2**53, 0.0]


def verdict_on(case: tuple[list[Any], str, list[Any]], rank: int) -> str:
    """Check a case on all ranks: what is wrong on this one, or that something is on another."""
    error, checksum = "", 0
    try:
        checksum = zlib.crc32(repr(check_case(case, rank)).encode())
    except Exception as failure:
        error = f"{type(failure).__name__}: {failure}"
    if get_world_size() == 1:
        return error
    verdict = torch.tensor([bool(error), checksum, -checksum])
    dist.all_reduce(verdict, dist.ReduceOp.MAX)
    if verdict[0]:
        return error or "right here, wrong on another rank"
    return "" if verdict[1] == -verdict[2] else "the ranks got different results"


def from_rank_0(case: Any) -> Any:
    if get_world_size() == 1:
        return case
    held = [case]
    dist.broadcast_object_list(held)
    return held[0]


def right_for_everything(examples: int) -> None:
    """Rank 0 draws and shrinks, and the others take its cases: what is drawn depends on the modules of the process."""
    rank, world = get_rank(), get_world_size()
    if rank:
        while (case := from_rank_0(None)) is not None:
            verdict_on(case, rank)
        return

    @settings(
        max_examples=examples, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck)
    )
    @given(cases(world))
    @example((MIXED[-world:], "max", [None] * world))
    def run(case: Any) -> None:
        error = verdict_on(from_rank_0(case), rank)
        assert not error, error

    try:
        run()
    finally:
        from_rank_0(None)


@pytest.mark.parametrize("world", [2, 3])
def test_it_is_right_for_everything_on_ranks(world: int) -> None:
    on_ranks(right_for_everything, world, 100, timeout=120)


def test_it_is_right_for_everything_on_one_process() -> None:
    right_for_everything(100)


# --- the cases that everybody gets wrong, by name ---------------------------------------------------------------------


def known_traps() -> dict[str, Any]:
    rank, nan = get_rank(), math.nan
    large = [torch.full((1000,), 1 + rank, dtype=dtype) for dtype in (torch.float32, torch.float64, torch.int64)]
    expanded = torch.tensor([1.0 + rank]).expand(3)
    return {
        "bool": all_reduce_mean(rank == 0),
        "bools": all_reduce(torch.tensor([True, rank == 0, False])),
        "uint8": all_reduce_mean(torch.full((2,), 200, dtype=torch.uint8)),
        "uint8 sum": all_reduce(torch.full((2,), 200, dtype=torch.uint8)),
        "2^24 + 1": all_reduce_mean(torch.tensor(2**24 + 1)),
        "2^53 + 1": all_reduce_mean(
            {"tensor": torch.tensor([2**53 + 1, 2**53 + 2 * rank + 1]), "number": 2**53 + 2 * rank + 1}
        ),
        "2^53 + 1 sum": all_reduce(torch.tensor([2**53 + 1])),
        "2^52 sum": all_reduce(2**52 - 1),
        "large int64": all_reduce_mean(torch.full((1000,), 2**62 + rank)),
        "float16": all_reduce_mean(torch.tensor([40000.0, 40000.0], dtype=torch.float16)),
        "large float16": all_reduce_mean(torch.full((1000,), 40000.0, dtype=torch.float16)),
        "bfloat16": all_reduce_mean(torch.tensor(256.0 if rank else 1.0, dtype=torch.bfloat16)),
        "bfloat16 sum": all_reduce(torch.tensor(256.0 if rank else 2.0, dtype=torch.bfloat16)),
        "expanded": (all_reduce_mean(expanded), expanded),
        "weights": all_reduce_mean({"loss": 5.0 if rank else 1.0}, weight=1 if rank else 3),
        "weight 0": all_reduce_mean(
            {"loss": nan if rank else 1.0, "x": torch.full((600,), nan if rank else 2.0)}, weight=1 - rank
        ),
        "key order": all_reduce_mean({"acc": 1, "loss": 2} if rank else {"loss": 2, "acc": 1}),
        "0 and 0.0": all_reduce_mean(0.0 if rank else 0),
        "large inputs": [(all_reduce(x), all_reduce(x, "max"), all_reduce(x, check=False), x) for x in large],
        "unchecked": (
            all_reduce_mean(torch.tensor([1.0, 2.0 + 2 * rank]), check=False),
            all_reduce(3 * torch.ones(1), check=False),
        ),
    }


def test_known_traps_on_two_ranks() -> None:
    for rank, got in enumerate(on_ranks(known_traps, 2)):
        assert got["bool"] == 0.5 and type(got["bool"]) is float
        assert got["bools"].tolist() == [2, 1, 0] and got["bools"].dtype == torch.int64
        assert got["uint8"].tolist() == [200.0, 200.0] and got["uint8"].dtype == torch.float64
        assert got["uint8 sum"].tolist() == [400, 400] and got["uint8 sum"].dtype == torch.int64
        assert got["2^24 + 1"].item() == 2**24 + 1
        mean = float(Fraction(2 * 2**53 + 4, 2))
        assert got["2^53 + 1"]["tensor"].tolist() == [float(2**53 + 1), mean] and got["2^53 + 1"]["number"] == mean
        assert got["2^53 + 1 sum"].tolist() == [2**54 + 2]
        assert got["2^52 sum"] == 2**53 - 2 and type(got["2^52 sum"]) is int
        assert got["large int64"].unique().tolist() == [float(2**62)]
        assert got["float16"].tolist() == [40000.0, 40000.0] and got["float16"].dtype == torch.float16
        assert got["large float16"].unique().tolist() == [40000.0] and got["large float16"].dtype == torch.float16
        assert got["bfloat16"].item() == 128.0 and got["bfloat16"].dtype == torch.bfloat16  # 128.5, a tie
        assert got["bfloat16 sum"].item() == 258.0
        assert got["expanded"][0].tolist() == [1.5] * 3 and got["expanded"][1].tolist() == [1.0 + rank] * 3
        assert got["weights"] == {"loss": 2.0}
        assert got["weight 0"]["loss"] == 1.0 and got["weight 0"]["x"].unique().tolist() == [2.0]
        assert (
            got["key order"] == {"acc": 1.0, "loss": 2.0}
            and list(got["key order"]) == [["loss", "acc"], ["acc", "loss"]][rank]
        )
        assert got["0 and 0.0"] == 0.0
        for results in got["large inputs"]:
            assert [x.unique().tolist() for x in results] == [[3], [2], [3], [1 + rank]]
        assert got["unchecked"][0].tolist() == [1.0, 3.0] and got["unchecked"][1].tolist() == [6.0]


def contained() -> dict[str, Any]:
    """Each rank passes its number, in containers with ways of their own."""
    rank = get_rank()
    value = {
        "counter": Counter(a=rank, b=1),
        "output": Output(loss=torch.tensor(float(rank))),
        "mirror": Mirror({"deep": {"f1": float(rank)}}),
        "derived": Derived(float(rank)),
        "fixed": Fixed(float(rank)),
    }
    sums = all_reduce(value)
    assert value["counter"] == Counter(a=rank, b=1) and value["mirror"].deep.f1 == rank
    assert type(sums["fixed"]) is Fixed
    return {**sums, "fixed": tuple(sums["fixed"])}  # its constructor takes one argument, pickle gives it two


@pytest.mark.parametrize("world", [1, 2, 3])
def test_containers_with_ways_of_their_own_hold_the_sums(world: int) -> None:
    total = sum(range(world))
    for got in on_ranks(contained, world):
        assert got["counter"] == Counter(a=total, b=world)
        assert got["output"].loss == got["output"]["loss"] == total
        assert got["mirror"].deep.f1 == got["mirror"]["deep"]["f1"] == total
        assert (got["derived"].first, got["derived"].made) == (total, [total])
        assert got["fixed"] == (total, 2 * total)


# --- one answer whatever the size -------------------------------------------------------------------------------------


SIZES = (1, 600)  # with the check, and after it
GREATEST = {
    torch.float64: 1.7e308,
    torch.float32: 3e38,
    torch.bfloat16: 3e38,
    torch.float16: 60000.0,
}


def huge() -> dict[Any, Any]:
    """Means and sums near the largest number of a dtype."""
    found: dict[Any, Any] = {}
    for size in SIZES:
        for dtype, top in GREATEST.items():
            big = torch.full((size,), top, dtype=dtype)
            small = torch.full((size,), 2.0**-10 * (get_rank() + 1), dtype=dtype)
            found[size, dtype, "mean"] = all_reduce_mean(torch.cat([big, small])).tolist()
            found[size, dtype, "overflow"] = all_reduce(big).tolist()
            found[size, dtype, "nan"] = all_reduce_mean(torch.cat([big, big * math.nan, big * math.inf])).tolist()
            found[size, dtype, "unchecked"] = all_reduce_mean(big, check=False).tolist()
        numbers = [1.7e308] * size + [0.1] * size
        found[size, "number", "mean"] = all_reduce_mean(numbers)
        found[size, "number", "mixed"] = all_reduce_mean([1.7e308, 2 if get_rank() else 2.5, 3] * size)
        found[size, "number", "overflow"] = all_reduce(numbers[:size])
    return found


@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_largest_numbers_have_means_in_every_size(world: int) -> None:
    got, *others = on_ranks(huge, world)
    assert all(repr(other) == repr(got) for other in others)
    for size in SIZES:
        for dtype, top in GREATEST.items():
            big = torch.tensor(top, dtype=dtype).item()
            eps = torch.finfo(dtype).eps
            low = 2.0**-10 * (world + 1) / 2
            for name, values in {"mean": [big, low], "unchecked": [big]}.items():
                each = [x for x in values for _ in range(size)]
                assert got[size, dtype, name] == pytest.approx(each, rel=2 * eps, abs=1e-300), (size, dtype, name)
            overflow = got[size, dtype, "overflow"]
            assert overflow == [big if world == 1 else math.inf] * size, (size, dtype)
            nan = got[size, dtype, "nan"]
            assert nan[0] == pytest.approx(big, rel=eps) and nan[size] != nan[size] and nan[2 * size] == math.inf
        assert got[size, "number", "mean"] == pytest.approx([1.7e308] * size + [0.1] * size, rel=1e-15)
        mixed = got[size, "number", "mixed"]
        assert mixed[0] == pytest.approx(1.7e308) and mixed[1] == pytest.approx((2.5 + 2 * (world - 1)) / world)
        assert mixed[2] == 3.0
        assert got[size, "number", "overflow"] == [1.7e308 if world == 1 else math.inf] * size


WEIGHTS = {  # by rank
    "samples": (3, 0, 1),
    "small": (1e-20, 3e-20, 2e-20),
    "large": (1e20, 1e19, 3e20 / 4),
}


def weighted() -> dict[str, list[float]]:
    rank = get_rank()
    tensors = [torch.full((size,), rank + 1.5, dtype=dtype) for size in SIZES for dtype in GREATEST]
    found = {}
    for name, weights in WEIGHTS.items():
        means = all_reduce_mean([*tensors, np.arange(600) + rank], weight=weights[rank])
        found[name] = [mean[-1].item() for mean in means]
    return found


@pytest.mark.parametrize("world", [1, 2, 3])
def test_weights_count_alike_in_every_size_and_dtype(world: int) -> None:
    for got in on_ranks(weighted, world):
        for name, weights in WEIGHTS.items():
            rank = sum(rank * weight for rank, weight in enumerate(weights[:world])) / sum(weights[:world])
            *means, of_ints = got[name]
            assert means == pytest.approx([1.5 + rank] * 8, rel=0.01) and of_ints == pytest.approx(599 + rank)


def without_warnings() -> None:
    with warnings.catch_warnings(), np.errstate(over="raise", divide="raise", invalid="raise"):
        warnings.simplefilter("error")
        for call in (huge, weighted, contained):
            call()
        assert all_reduce_mean([1e300, math.inf, math.nan], weight=10)[0] == 1e300


@pytest.mark.parametrize("world", [1, 2, 3])
def test_no_result_comes_with_a_warning(world: int) -> None:
    on_ranks(without_warnings, world)


def keep_what_was_passed() -> None:
    """Reduce tensors of each size and layout, and compare them afterwards with copies of before."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int32):
        for size in (4, 1000):
            passed = torch.arange(size).to(dtype) + get_rank()
            for value in (passed, passed.flip(0)[::2], [passed, passed]):
                before = pickle.dumps(value)
                for op in ("sum", "mean", "min", "max"):
                    reduced = all_reduce(value, op)
                    first = reduced[0] if isinstance(reduced, list) else reduced
                    assert first.untyped_storage().data_ptr() != passed.untyped_storage().data_ptr()
                all_reduce_mean(value, weight=get_rank() + 1)
                assert pickle.dumps(value) == before
            if dtype.is_floating_point:
                empty = torch._efficientzerotensor((size,), dtype=dtype)  # without memory
                assert torch.equal(all_reduce(empty if get_rank() else passed), torch.arange(size).to(dtype))
                negated = torch._neg_view(passed)
                assert torch.equal(all_reduce(negated), -all_reduce(passed))


def test_on_one_process_no_bit_changes() -> None:
    bits = torch.tensor([0x7FA00001, 1, -(2**31)] * 500, dtype=torch.int32)  # a signalling NaN, the least number, -0.0
    assert torch.equal(all_reduce_mean(bits.view(torch.float32)).view(torch.int32), bits)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_what_was_passed_is_left_alone(world: int) -> None:
    on_ranks(keep_what_was_passed, world)


def counted() -> dict[str, int]:
    """How many collectives torch really ran in each call, as its profiler saw them."""
    scalars = {f"metric {i}": float(i) for i in range(50)}
    tensors = {name: torch.tensor(value) for name, value in scalars.items()}
    mixed = {**scalars, "halves": torch.ones(100, dtype=torch.float16), "steps": np.arange(50), "done": True}
    big = {**mixed, "half": torch.ones(999).half(), "float": torch.ones(99, 99), "double": torch.ones(999).double()}
    calls: dict[str, Callable[[], Any]] = {
        "50 numbers": lambda: all_reduce_mean(scalars),
        "50 tensors": lambda: all_reduce_mean(tensors),
        "mixed": lambda: all_reduce_mean(mixed),
        "weighted": lambda: all_reduce_mean(mixed, weight=2),
        "big": lambda: all_reduce_mean(big),
        "max": lambda: all_reduce(big, "max"),
        "unchecked": lambda: all_reduce_mean(torch.ones(5), check=False),
        "broadcast": lambda: broadcast({"lr": 0.1, "name": "run"} if get_rank() == 0 else None),
        "all_gather": lambda: all_gather(torch.ones(get_rank())),
        "long all_gather": lambda: all_gather(torch.ones(get_rank() * 999)),
    }
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for name, call in calls.items():
            with torch.profiler.record_function(name):
                call()
    counts = dict.fromkeys(calls, 0)
    for event in profile.events():
        if event.name.startswith("c10d::"):
            while event.name not in calls:
                event = event.cpu_parent
            counts[event.name] += 1
    return counts


def test_fifty_scalars_cost_one_collective_check_included() -> None:
    for counts in on_ranks(counted, 2):
        assert counts == {
            **{"50 numbers": 1, "50 tensors": 1, "mixed": 1, "weighted": 1},
            **{"big": 4, "max": 6, "unchecked": 1, "broadcast": 1, "all_gather": 1, "long all_gather": 2},
        }


# --- ranks that differ ------------------------------------------------------------------------------------------------


def raised(call: Callable[[], Any]) -> tuple[str, str, float]:
    start = time.perf_counter()
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error), time.perf_counter() - start
    return "", "", time.perf_counter() - start


def last(one: Any, others: Any) -> Any:
    """`one` on the last rank, `others` elsewhere."""
    return one if get_rank() == get_world_size() - 1 else others


DIFFERENT: dict[str, tuple[Callable[[], Any], str]] = {
    "keys": (
        lambda: all_reduce_mean(last({"loss": 1.0, "f1": 0.5}, {"loss": 1.0})),
        r"all_reduce_mean\(value\) needs the same structure.*\n  value: dict of 1 on rank.* 0.*; dict of 2 on rank \d\n"
        r"  value\['f1'\]: missing on ranks? 0.*; number on rank \d$",
    ),
    "dtype": (
        lambda: all_reduce_mean(torch.ones(2, dtype=last(torch.int32, torch.float32))),
        r"value: float32 tensor of shape \(2,\) on ranks? 0.*; int32 tensor of shape \(2,\) on rank \d",
    ),
    "shape": (lambda: all_reduce_mean({"x": torch.ones(last((3, 2), (2, 3)))}), r"value\['x'\]: .*\(2, 3\).*\(3, 2\)"),
    "size": (lambda: all_reduce_mean(torch.ones(last(3, 5))), r"\(5,\) on ranks? 0.*; float32 tensor of shape \(3,\)"),
    "large size": (lambda: all_reduce_mean(torch.ones(last(3000, 5000))), r"\(5000,\).*\(3000,\)"),
    "large against small": (lambda: all_reduce(torch.ones(last(3, 5000)), "max"), r"\(5000,\).*\(3,\)"),
    "kind": (lambda: all_reduce_mean([last(torch.tensor(1.0), 1.0)]), r"value\[0\]: number on .*; float32 tensor"),
    "container": (lambda: all_reduce_mean(last([1.0], (1.0,))), r"value: tuple of 1 on .*; list of 1 on"),
    "class": (
        lambda: all_reduce_mean(last(Point(1, 2), Metrics(1, 2))),
        r"dataclass Metrics of 2 .*namedtuple Point of 2",
    ),
    "empty": (lambda: all_reduce_mean(last({}, [])), r"value: list of 0 on .*; dict of 0 on"),
    "some weights": (
        lambda: all_reduce_mean(1.0, last(1.0, None)),
        r"all_reduce_mean\(value\) on .*; all_reduce_mean\(value, weight\) on",
    ),
    "op": (
        lambda: all_reduce(1.0, last("sum", "max")),
        r"different collectives: all_reduce\(value, 'max'\) on .*'sum'\) on",
    ),
    "function": (
        lambda: last(all_gather, broadcast)(torch.ones(2)),
        r"different collectives: broadcast\(src=0\) on .*; all_gather",
    ),
    "gather dtype": (
        lambda: all_gather(torch.ones(2, dtype=last(torch.int32, torch.int64))),
        r"value: int64 tensor .*\(any\).*int32",
    ),
    "gather shape": (lambda: all_gather(torch.ones(last((2, 3), (2, 4)))), r"\(any, 4\) on cpu on .*\(any, 3\)"),
    "gather dimensions": (lambda: all_gather(torch.ones(last((), (1,)))), r"shape \(any\) .*shape \(\)"),
    "source": (lambda: broadcast(1, src=last(0, 1)), r"broadcast\(src=1\) on .*; broadcast\(src=0\) on"),
    "length": (lambda: gather_exact([], [], n=last(0, 1)), r"gather_exact\(n=1\) on .*; gather_exact\(n=0\) on"),
    "many": (lambda: all_reduce_mean({f"{last('x', 'y')}{i}": 1 for i in range(30)}), r"\n  and 50 more$"),
}

BAD_ON_ONE: dict[str, tuple[Callable[[], Any], str, str]] = {
    "leaf": (
        lambda: all_reduce_mean({"a": [last("text", 1.0)]}),
        "TypeError",
        r"object of type str at value\['a'\]\[0\]",
    ),
    "size": (
        lambda: all_reduce({"a": last(torch.Size([2]), [2])}, "max"),
        "TypeError",
        r"object of type Size at value\['a'\]",
    ),
    "subclass": (
        lambda: all_reduce(last(Labelled({"x": 1}, 5.0), 1)),
        "TypeError",
        r"Labelled \(pass dict\(it\)\) at value\.",
    ),
    "meta": (lambda: all_reduce([last(torch.ones(1, device="meta"), 1)]), "TypeError", r"meta .*at value\[0\]"),
    "None": (lambda: all_reduce_mean(last(None, 1.0)), "TypeError", r"object of type NoneType at value\."),
    "weight": (
        lambda: all_reduce_mean(1.0, last(-1, 1)),
        "ValueError",
        r"weight must be 0, or from 1e-20 to 1e\+20, got -1",
    ),
    "weight nan": (lambda: all_reduce_mean(1.0, last(math.nan, 1)), "ValueError", r"weight must be .*, got nan"),
    "weight type": (lambda: all_reduce_mean(1.0, last("3", 1)), "TypeError", r"weight must be a number, got str"),
    "huge": (lambda: all_reduce(last(2**64, 1)), "OverflowError", r"beyond 2\^53 .*18446744073709551616"),
    "nanoseconds": (
        lambda: all_reduce({"now": last(time.time_ns(), 1)}, "max"),
        "OverflowError",
        r"beyond 2\^53 .*'max'.*Subtract a common start.*torch.tensor\(it\)",
    ),
    "op": (
        lambda: all_reduce(1.0, last("avg", "sum")),
        "ValueError",
        r"op must be one of sum, mean, min, max, got 'avg'",
    ),
    "gather": (
        lambda: all_gather(last([1], torch.ones(1))),
        "TypeError",
        r"takes dense tensors.*found int at value\[0\]",
    ),
    "pickle": (lambda: all_gather_object(last(lambda: 0, 1)), "(PicklingError|AttributeError)", r"lambda"),
    "source": (lambda: broadcast(1, last(9, 0)), "ValueError", r"src must be a rank, 0 to \d, got 9"),
    "source's value": (
        lambda: broadcast(last(lambda: 0, 1), get_world_size() - 1),
        "(PicklingError|AttributeError)",
        r"lambda",
    ),
    "indices": (
        lambda: gather_exact(last([1], []), [], n=0),
        "ValueError",
        r"values holds 1 result, but there are 0 indices",
    ),
}

BAD_ON_ALL: dict[str, tuple[Callable[[], Any], str, str]] = {
    "leaf": (lambda: all_reduce_mean({"name": "run"}), "TypeError", r"object of type str at value\['name'\]"),
    "weights": (lambda: all_reduce_mean(1.0, weight=0), "ValueError", r"weights are 0 on every rank"),
    "op": (lambda: all_reduce(1.0, "product"), "ValueError", r"op must be one of"),
    "near op": (lambda: all_reduce(1.0, "maxx"), "ValueError", r"one of sum, mean, min, max, got 'maxx'"),
    "source": (lambda: broadcast(1, src=-1), "ValueError", r"src must be a rank"),
    "gradient": (
        lambda: all_gather(torch.ones(2, requires_grad=True).sum()),
        "ValueError",
        r"would lose the gradient of value. Use gather_batch\(\).*\.detach\(\)",
    ),
    "sum": (lambda: all_reduce(2**53 + 1), "OverflowError", r"beyond 2\^53 .*'sum'"),
}


def differing() -> list[Any]:
    found = []
    for table in (DIFFERENT, BAD_ON_ONE, BAD_ON_ALL):
        found.append({name: raised(row[0]) for name, row in table.items()})
        assert all_reduce_mean({"still": get_rank()}) == {"still": (get_world_size() - 1) / 2}
    return found


def assert_all_raised(found: list[Any]) -> None:
    world = len(found)
    for rank, (different, on_one, on_all) in enumerate(found):
        for name, (_, text) in DIFFERENT.items():
            kind, message, seconds = different[name]
            assert (kind, seconds < 30) == ("MismatchError", True), (name, different[name])
            assert re.search(text, message), (name, message)
        for name, (_, error, text) in BAD_ON_ONE.items():
            kind, message, seconds = on_one[name]
            assert re.fullmatch(error if rank == world - 1 else "MismatchError", kind) and seconds < 30, (
                name,
                on_one[name],
            )
            assert re.search(
                text if rank == world - 1 else rf"bad argument:\n  rank {world - 1}: {error}: .*{text}", message
            )
        for name, (_, error, text) in BAD_ON_ALL.items():
            kind, message, seconds = on_all[name]
            assert kind == error and re.search(text, message) and seconds < 30, (name, on_all[name])


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_that_differ_all_raise_at_once_and_go_on(world: int) -> None:
    assert_all_raised(on_ranks(differing, world))


@pytest.mark.parametrize("name", list(BAD_ON_ALL))
def test_one_process_refuses_what_ranks_refuse(name: str) -> None:
    call, error, text = BAD_ON_ALL[name]
    kind, message, _ = raised(call)
    assert kind == error and re.search(text, message)


def test_launched_but_not_set_up_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
    for name, value in {**launch, "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    tensor = torch.ones(1)
    for call in (
        *(lambda: all_reduce_mean(1.0), lambda: all_reduce(1), lambda: all_reduce(tensor, check=False)),
        *(
            lambda: all_gather(tensor),
            lambda: all_gather_object(1),
            lambda: broadcast(1),
            lambda: gather_exact([], [], 0),
        ),
    ):
        with pytest.raises(NotSetUpError):
            call()


def average_where_numpy_raises() -> tuple[Any, ...]:
    small = torch.full((), 2.2250738585e-313, dtype=torch.float64)
    with np.errstate(all="raise"):
        tiny = all_reduce_mean({"number": small.item(), "tensor": small})
    found = all_reduce_mean({"a": small, "b": torch.ones(300), "c": torch.tensor([1, 2])})
    return tiny["number"], tiny["tensor"].item(), [tensor.untyped_storage().nbytes() for tensor in found.values()]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_results_own_their_memory_and_numpys_error_settings_do_not_count(world_size: int) -> None:
    small = pytest.approx(2.2250738585e-313)
    assert on_ranks(average_where_numpy_raises, world_size) == [(small, small, [8, 1200, 16])] * world_size


def average_within_a_functional_gradient() -> list[float]:
    gradient = torch.func.grad(lambda x: all_reduce_mean({"loss": x.detach().sum()})["loss"] * x.sum())
    found: list[float] = gradient(torch.ones(3)).tolist()
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_losses_are_averaged_within_a_functional_gradient(world_size: int) -> None:
    try:
        torch.func.grad(lambda x: x.sum() * x.detach().tolist()[0])(torch.ones(3))
    except RuntimeError as error:  # 2.6
        pytest.skip(f"this torch cannot read a tensor's elements there: {error}")
    assert on_ranks(average_within_a_functional_gradient, world_size) == [[3.0, 3.0, 3.0]] * world_size
