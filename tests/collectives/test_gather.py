"""Gathering, broadcasting and evaluation results in order, on real ranks."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from conftest import on_ranks
from test_ops import last, raised
from torch import nn

from ddpkit import all_gather, all_gather_object, broadcast, gather_exact, get_rank, get_world_size
from ddpkit.collectives.consistency import PAYLOAD


@dataclass(frozen=True)
class Config:
    name: str
    layers: list[Any]


KINDS = ["foo", {1: 2}, [24, {"a": "b"}]]  # of objects, one for each rank


def gathered() -> dict[str, Any]:
    rank = get_rank()
    grown = torch.arange(2.0 * rank).reshape(rank, 2)
    kinds = (torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float16, torch.complex64, torch.uint16)
    typed = [(kind, all_gather(torch.tensor([rank, 1]).to(kind))) for kind in kinds]
    modules = [f"ddpkit.collectives.{name}.PAYLOAD" for name in ("consistency", "transfer")]
    with patch(modules[0], 0), patch(modules[1], 0):  # as on more ranks than the first block has room for
        crowded = all_gather(torch.arange(rank))
    return {
        "uneven": all_gather(grown),
        "scalar": all_gather(torch.tensor(rank)),
        "crowded": crowded,
        "mixed": all_gather({"bytes": torch.arange(3).byte() + rank, "doubles": torch.arange(2.0).double()}),
        "empty": all_gather(torch.zeros(0, 3)),
        "no columns": all_gather(torch.zeros(rank, 0)),
        "transposed": all_gather(torch.arange(6).reshape(2, 3).T + rank),
        "dtypes": [[x.to(torch.complex128) for x in each if x.dtype == kind] for kind, each in typed],
        "conjugate": all_gather(torch.tensor([1j * rank]).conj()),
        "zero": all_gather(torch._efficientzerotensor((2,))),
        "zero object": all_gather_object(torch._efficientzerotensor((2,))),
        "kinds": all_gather_object(KINDS[rank]),
        "objects": all_gather_object({"rank": rank, "text": "x" * 5000 * rank, "none": None}),
    }


@pytest.mark.parametrize("world", [1, 2, 3])
def test_all_gather_gives_every_rank_each_tensor_as_it_was(world: int) -> None:
    for got in on_ranks(gathered, world):
        for other in range(world):
            uneven = got["uneven"][other]
            assert torch.equal(uneven, torch.arange(2.0 * other).reshape(other, 2))
            assert got["scalar"][other].shape == () and got["scalar"][other].item() == other
            mixed = got["mixed"][other]
            assert mixed["bytes"].tolist() == [other, other + 1, other + 2] and mixed["doubles"].tolist() == [0, 1]
            assert mixed["bytes"].untyped_storage().nbytes() == 3  # its own
            assert got["crowded"][other].tolist() == list(range(other))
            assert got["empty"][other].shape == (0, 3) and got["no columns"][other].shape == (other, 0)
            assert torch.equal(got["transposed"][other], torch.arange(6).reshape(2, 3).T + other)
            assert [tensors[other].tolist() for tensors in got["dtypes"]] == [[bool(other), 1], *[[other, 1]] * 6]
            assert got["conjugate"][other].tolist() == [-1j * other]
            assert got["zero"][other].tolist() == got["zero object"][other].tolist() == [0.0, 0.0]
            assert got["kinds"][other] == KINDS[other]
            assert got["objects"][other] == {"rank": other, "text": "x" * 5000 * other, "none": None}
        assert {len(each) for name, each in got.items() if name != "dtypes"} == {world}


def gathered_at_the_border() -> list[bool]:
    """Gather as many bytes as travel with the check, one more on the last rank, and one more on all."""
    rank, world = get_rank(), get_world_size()
    most = 4 * (PAYLOAD // world - 2)  # in two matrices, whose counts travel there, too
    same = []
    for last_rank, others in ((most, most), (most + 1, most), (most + 1, most + 1)):
        sizes = [others] * (world - 1) + [last_rank]
        values = [{"a": torch.arange(size - 3).byte(), "b": torch.arange(3).byte() + r} for r, size in enumerate(sizes)]
        found = all_gather(values[rank])
        same.append(all(torch.equal(f[key], v[key]) for f, v in zip(found, values, strict=True) for key in v))
    return same


@pytest.mark.parametrize("world", [2, 3])
def test_what_fits_into_the_check_arrives_as_what_does_not(world: int) -> None:
    assert on_ranks(gathered_at_the_border, world) == [[True] * 3] * world


def a_value(rank: int) -> dict[str, Any]:
    shared = torch.arange(3) + rank
    return {
        "config": Config(name="mse", layers=[1, (2.5, None), {"lr": 1e-3, "deep": {True: b"bytes"}}]),
        "tensors": [
            shared,
            shared,
            (torch.ones(300, 20, requires_grad=True) * rank).detach(),
            torch.zeros(0, 2),
            torch.tensor(True),
        ],
        "strided": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).T,
        "sparse": torch.eye(3).to_sparse(),
        "array": np.full((2, 2), rank),
        "parameter": nn.Parameter(torch.full((2,), float(rank))),
    }


def broadcasted() -> list[Any]:
    rank, world = get_rank(), get_world_size()
    found = []
    for src in range(world):
        found.append(broadcast(a_value(src) if rank == src else None, src))
        for size in (0, 1900, 1970, 1980, 2000, 5000):  # about the room that the first block has
            value = "é" + "x" * size
            assert broadcast(value if rank == src else None, src=src) == value
    assert torch.equal(broadcast(torch._efficientzerotensor((2,)) if rank == 0 else None), torch.zeros(2))
    model = nn.Linear(3, 2)
    with torch.no_grad():
        model.weight.fill_(rank)
    other = broadcast(model if rank == 0 else None)
    assert [type(p) for p in other.parameters()] == [nn.Parameter] * 2 and other.weight.unique().tolist() == [0.0]
    assert broadcast(None if rank == 0 else "ignored") is None
    kept = broadcast({"a": torch.ones(1)}) if rank == 0 else broadcast("ignored")
    kept["a"].add_(rank)
    assert [x["a"].item() for x in all_gather_object(kept)] == [1.0 + other for other in range(world)]
    return found


@pytest.mark.parametrize("world", [1, 2, 3])
def test_broadcast_gives_every_rank_the_value_of_one(world: int) -> None:
    for rank, found in enumerate(on_ranks(broadcasted, world)):
        for src, got in enumerate(found):
            expected = a_value(src)
            assert got["config"] == expected["config"] and (got["array"] == src).all()
            for one, other in zip(got["tensors"], expected["tensors"], strict=True):
                assert one.dtype == other.dtype and torch.equal(one, other)
                assert rank == src or not one.requires_grad
            assert got["tensors"][0] is got["tensors"][1]
            assert torch.equal(got["strided"], expected["strided"]) and got["sparse"].is_sparse
            assert torch.equal(got["parameter"], expected["parameter"]) and type(got["parameter"]) is nn.Parameter


def odd_strides(rank: int) -> dict[str, torch.Tensor]:
    """Tensors whose strides, signs or conjugations are not those of their elements in a row."""
    numbers = torch.arange(6.0).reshape(2, 3) + rank
    phase = torch.tensor([1 + 2j, rank * 1j])
    return {
        "a column of one row": numbers[:1, 0],
        "in half": numbers[:1, 0].half()[None][:, 0],
        "one element of a transposed matrix": numbers[:1, :1].t(),
        "one element of stride 0": numbers.as_strided((1,), (0,)),
        "a column of no rows": numbers[:0, 1],
        "no columns": numbers[:, :0].t(),
        "a number": numbers[1, 2],
        "expanded": numbers[0, 1].expand(2, 3),
        "channels last": torch.arange(2.0 * 3 * 4).reshape(2, 3, 2, 2).to(memory_format=torch.channels_last) + rank,
        "one imaginary part of a conjugate": phase[:1].conj().imag,
        "imaginary parts of a conjugate": phase.conj().imag,
        "conjugate": phase.conj(),
        "one conjugate": torch.stack([phase, phase]).T[:1, 1].conj(),
        "a parameter": nn.Parameter(numbers[:1, 0]),
        "of a class of its own": numbers[:1, 0].as_subclass(Marked),
    }


class Marked(torch.Tensor):
    """A tensor of somebody's own class."""


def with_odd_strides() -> None:
    rank, world = get_rank(), get_world_size()
    for name in odd_strides(rank):
        values = [odd_strides(other)[name] for other in range(world)]
        for src, value in enumerate(values):
            assert torch.equal(broadcast({"x": values[rank]}, src=src)["x"], value), name
        assert all(map(torch.equal, all_gather(values[rank].detach()), values)), name
        assert all(map(torch.equal, all_gather_object(values[rank]), values)), name
        if values[rank].dim():
            mine = len(values[rank])
            together = torch.cat([value.as_subclass(torch.Tensor) for value in values])
            assert torch.equal(
                gather_exact(values[rank], range(rank * mine, (rank + 1) * mine), mine * world), together
            )
    rows = torch.arange(3.0).repeat(1 if rank == 0 else 2, 1)  # a column of one row on one rank alone
    assert [len(column) for column in all_gather(rows[:, 1])] == [1, 2, 2][:world]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_strides_and_signs_do_not_matter(world: int) -> None:
    on_ranks(with_odd_strides, world)


YOUNG = [torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex32]


def of_young_dtypes() -> None:
    """Tensors that torch's own pickling does not know."""
    rank, world = get_rank(), get_world_size()
    for dtype in YOUNG:
        rows = torch.arange(6.0).reshape(3, 2).to(torch.complex64 if dtype.is_complex else torch.float32)

        def like(x: torch.Tensor, whole: torch.dtype = rows.dtype) -> list[Any]:
            return x.to(whole).tolist()

        column = rows.to(dtype)[:, 0]
        got = gather_exact(column[rank % 2 :: 2] if world == 2 else column[rank::world], range(3)[rank::world], 3)
        assert got.dtype == dtype and like(got) == like(column)
        model = nn.Module()
        model.register_buffer("table", column)
        for other in all_gather_object({"x": [column], "model": model}):
            assert other["x"][0].dtype == dtype and like(other["x"][0]) == like(other["model"].table) == like(column)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("world", [1, 2, 3])
def test_tensors_of_young_dtypes_are_gathered_as_objects(world: int) -> None:
    on_ranks(of_young_dtypes, world)


def of_texts() -> None:
    rank, world = get_rank(), get_world_size()
    for kind in ("U", "S"):
        texts = [str(place) * 3**place for place in range(4)]
        column = np.array(texts[rank::world], dtype=kind)  # as long as the longest of its own
        assert gather_exact(column, range(rank, 4, world), 4).tolist() == np.array(texts, dtype=kind).tolist()
    error, message, _ = raised(lambda: gather_exact(np.array(["a"], last("S", "U")), [rank], world))
    assert (error, "str array" in message and "bytes array" in message) == ("MismatchError", True) or world == 1


@pytest.mark.parametrize("world", [1, 2, 3])
def test_arrays_of_texts_may_differ_in_their_longest(world: int) -> None:
    on_ranks(of_texts, world)


NO_INDEX = [torch.tensor(2.0), torch.tensor([0, 1]), np.array([0, 1]), np.array(2.0), 1.0, "1", None, True]


def with_no_index_on_one_rank() -> None:
    rank, world = get_rank(), get_world_size()
    for wrong in NO_INDEX:
        for call in (lambda n: gather_exact([1], [rank], n), lambda src: broadcast(1, "" if src is None else src)):
            error, message, seconds = raised(lambda call=call, wrong=wrong: call(last(wrong, 0)))
            assert error == ("ValueError" if rank == world - 1 else "MismatchError"), (error, message)
            assert "got a bad argument" in message or "must be" in message
            assert seconds < 30


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_number_that_is_none_is_an_error_on_every_rank(world: int) -> None:
    on_ranks(with_no_index_on_one_rank, world)


def in_order() -> None:
    rank, world = get_rank(), get_world_size()
    for n in range(18):
        shuffled = torch.randperm(n, generator=torch.Generator().manual_seed(n))
        cut = shuffled.tensor_split(world)[rank] if n % 2 else shuffled[rank::world]
        assert gather_exact([f"sample {i}" for i in cut.tolist()], cut, n) == [f"sample {i}" for i in range(n)]
        table = torch.arange(2.0 * n).reshape(n, 2)
        assert torch.equal(gather_exact(table[cut].requires_grad_(), cut.tolist(), n), table)
        got = gather_exact(table.numpy()[cut.numpy()], cut.numpy().astype(np.uint8), n)
        assert isinstance(got, np.ndarray) and np.array_equal(got, table.numpy())
    if world > 1:  # a rank with nothing need not know the kind
        none = rank == 1
        got = gather_exact([] if none else torch.tensor([[10 * rank]]), [] if none else [rank // 2], n=world - 1)
        assert got.tolist() == [[10 * other] for other in range(world) if other != 1]


def out_of_order() -> dict[str, tuple[str, str, float]]:
    rank, world = get_rank(), get_world_size()

    def gather(own: Any, others: Any, n: int) -> tuple[str, str, float]:
        indices = own if rank == world - 1 else others
        return raised(lambda: gather_exact(torch.zeros(len(indices)), indices, n))

    return {
        "repeated": gather([0, 1, 3], [0] if world == 2 else ([0] if rank == 0 else [2]), 4),
        "missing": gather([5, 1], [0] if rank == 0 else [], 7),
        "out of range": gather([1, 2, -4], [0] if rank == 0 else [], 2),
        "dtype": raised(lambda: gather_exact(torch.zeros(1, dtype=last(torch.int32, torch.float32)), [rank], world)),
        "shape": raised(lambda: gather_exact(torch.zeros(last((1, 2), (1, 3))), [rank], world)),
        "kind": raised(lambda: gather_exact(last([1], np.zeros(1)), [rank], world)),
        "fine": raised(lambda: gather_exact([1], [rank], world)),
    }


def test_gather_exact_puts_results_in_order_on_one_process() -> None:
    in_order()


@pytest.mark.parametrize("world", [2, 3])
def test_gather_exact_puts_results_in_order(world: int) -> None:
    on_ranks(in_order, world)


@pytest.mark.parametrize("world", [2, 3])
def test_gather_exact_refuses_duplicates_and_holes_on_every_rank(world: int) -> None:
    last = world - 1
    for got in on_ranks(out_of_order, world):
        errors = {name: error for name, (error, _, _) in got.items()}
        values, mismatches = ("repeated", "missing", "out of range"), ("dtype", "shape", "kind")
        assert errors == {
            **dict.fromkeys(values, "ValueError"),
            **dict.fromkeys(mismatches, "MismatchError"),
            "fine": "",
        }
        assert all(seconds < 30 for _, _, seconds in got.values())
        assert f"1 repeated: 0 on ranks 0, {last}\n" in got["repeated"][1]
        assert "4 missing: 2, 3, 4, 6\n" in got["missing"][1] and "range(7)" in got["missing"][1]
        assert f"2 out of range: -4 on rank {last}, 2 on rank {last}\n" in got["out of range"][1]
        assert "DistributedEvalSampler" in got["repeated"][1]
        assert re.search(
            r"values: float32 tensor of shape \(any\) on .*; int32 tensor of shape \(any\) on rank", got["dtype"][1]
        )
        assert re.search(r"\(any, 3\) on .*\(any, 2\) on", got["shape"][1])
        assert re.search(r"float64 array of shape \(any\) on .*; a list on", got["kind"][1])


@pytest.mark.parametrize("indices", [[0, 0], [0, 2], [1], [0, 1, 1], [0.0, 1.0], [[0], [1]], [True, False]])
def test_gather_exact_on_one_process_refuses_wrong_indices(indices: Any) -> None:
    with pytest.raises(ValueError, match=r"range\(2\)|indices must be ints|holds 2 results"):
        gather_exact([10, 20], indices, n=2)


# --- trees ------------------------------------------------------------------------------------------------------------


@dataclass
class Results:
    loss: Any
    texts: Any


def columns(places: Any) -> dict[str, Any]:
    """What a model says of the samples at these places."""
    tensor = torch.as_tensor(list(places), dtype=torch.int64)
    return {
        "loss": tensor * 0.5,
        "logits": {"head": (tensor[:, None] + torch.arange(3)).to(torch.bfloat16).requires_grad_()},
        "results": Results(np.array(tensor), [f"sample {i}" for i in places]),
        "top": torch.max(tensor.reshape(-1, 1), dim=1).values,
        "boxes": [torch.arange(i) for i in places],
    }


def same_columns(got: Any, expected: Any) -> None:
    assert list(got) == list(expected)
    assert torch.equal(got["loss"], expected["loss"]) and torch.equal(got["top"], expected["top"])
    head = got["logits"]["head"]
    assert torch.equal(head, expected["logits"]["head"]) and not head.requires_grad
    assert type(got["results"]) is Results and got["results"].texts == expected["results"].texts
    assert np.array_equal(got["results"].loss, expected["results"].loss)
    assert all(map(torch.equal, got["boxes"], expected["boxes"]))


def tables_in_order() -> None:
    rank, world = get_rank(), get_world_size()
    for n in (2, 5, 7):  # two keys for two samples are not taken for the samples
        mine = range(rank, n, world)
        same_columns(gather_exact(columns(mine), mine, n), columns(range(n)))
    pairs = gather_exact({"a": torch.tensor([1, 2]) + rank, "b": [rank, rank]}, [2 * rank, 2 * rank + 1], 2 * world)
    assert pairs["b"] == [other for other in range(world) for _ in range(2)]
    for empty in ([], {}, columns([])):  # the last rank has nothing, and need not know the structure
        idle = rank == world - 1 and world > 1
        n = max(world - 1, 1)
        got = gather_exact(empty if idle else columns([rank]), [] if idle else [rank], n)
        same_columns(got, columns(range(n)))


def refused_tables() -> dict[str, tuple[str, str, float]]:
    rank, world = get_rank(), get_world_size()
    good = torch.zeros(1)
    bad: dict[str, Any] = {
        "length": {"a": {"loss": torch.zeros(3)}},
        "text": "a",
        "bytes": b"a",
        "text in a tree": {"name": "a"},
        "set": {1},
        "scalar": 1.0,
        "None": {"a": None},
        "no first dimension": torch.tensor(1.0),
        "array scalar": {"a": np.float32(1)},
        "tuple": (good,),
        "range": range(1),
        "masked": np.ma.masked_array([1.0], [True]),
        "sparse": torch.ones(1).to_sparse(),
        "meta": {"a": torch.ones(1, device="meta")},
    }
    found = {
        name: raised(lambda value=value: gather_exact(last(value, good), [rank], world)) for name, value in bad.items()
    }
    found["keys"] = raised(lambda: gather_exact({last("a", "b"): good}, [rank], world))
    found["dtype"] = raised(lambda: gather_exact({"a": {"b": last(good.int(), good)}}, [rank], world))
    found["fine"] = raised(lambda: gather_exact(good, [rank], world))
    return found


TABLE_ERRORS = {
    "length": r"values\['a'\]\['loss'\] holds 3 results, but there is 1 index",
    "text": r"found str at values\.",
    "bytes": r"found bytes at values\.",
    "text in a tree": r"found str at values\['name'\]\.",
    "set": r"found set at values\.",
    "scalar": r"found float at values\.",
    "None": r"found NoneType at values\['a'\]\.",
    "no first dimension": r"found a tensor without dimensions at values\.",
    "array scalar": r"found float32 at values\['a'\]\.",
    "tuple": r"array or list, or several such columns in a dict.*found tuple at values\.",
    "range": r"found range at values",
    "masked": r"found MaskedArray",
    "sparse": r"found a sparse_coo tensor",
    "meta": r"found a meta tensor.* at values\['a'\]",
}


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_tree_of_columns_is_put_in_order(world: int) -> None:
    on_ranks(tables_in_order, world)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_what_are_not_columns_is_refused_on_every_rank(world: int) -> None:
    for rank, got in enumerate(on_ranks(refused_tables, world)):
        for name, words in TABLE_ERRORS.items():
            kind, message, seconds = got[name]
            own = "ValueError" if name == "length" else "TypeError"
            assert kind == (own if rank == world - 1 else "MismatchError") and seconds < 30, (name, got[name])
            assert re.search(words, message), (name, message)
        assert got["fine"][0] == ""
        if world > 1:
            assert got["keys"][0] == got["dtype"][0] == "MismatchError"
            assert re.search(rf"values\['b'\].*missing on rank {world - 1}", got["keys"][1])
            assert re.search(rf"values\['a'\]\['b'\]: float32 .*; int32 .* on rank {world - 1}", got["dtype"][1])


def integers() -> None:
    rank, world = get_rank(), get_world_size()
    for n in (world, np.int64(world), np.uint8(world), torch.tensor(world)):
        for kind in (np.uint8, np.int16, ">i4", np.uint64):
            assert gather_exact([rank], np.array([rank], kind), last(n, world)) == list(range(world))
        for places in ([np.int32(rank)], (rank,), range(rank, rank + 1), torch.tensor([rank], dtype=torch.int16)):
            assert gather_exact([rank], places, n) == list(range(world))
    for src in (np.int32(world - 1), torch.tensor(world - 1)):
        assert broadcast(rank, last(src, world - 1)) == world - 1
    for wrong in (True, np.bool_(True), torch.tensor(True), 1.0, "1"):
        mine = last(wrong, 1)
        for call in (partial(broadcast, rank, mine), partial(gather_exact, [0], [0], mine)):
            kind, message, _ = raised(call)
            assert kind == last("ValueError", "MismatchError") and f"got {wrong!r}" in message


@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_kind_of_integer_is_one_and_bools_are_none(world: int) -> None:
    on_ranks(integers, world)


def gathered_trees() -> list[Any]:
    rank = get_rank()
    tree = {"b": Results(torch.full((rank, 2), rank), [torch.tensor(1j * rank)]), "a": torch.arange(rank)}
    assert all_gather({}) == [{}] * get_world_size()
    return all_gather(tree)


def refused_trees() -> dict[str, tuple[str, str, float]]:
    tensor = torch.zeros(1)
    return {
        "number": raised(lambda: all_gather({"a": [last(1.0, tensor)]})),
        "array": raised(lambda: all_gather(last(np.zeros(1), tensor))),
        "sparse": raised(lambda: all_gather({"a": last(tensor.to_sparse(), tensor)})),
        "keys": raised(lambda: all_gather({last("a", "b"): tensor})),
        "dtype": raised(lambda: all_gather([last(tensor.int(), tensor)])),
    }


@pytest.mark.parametrize("world", [1, 2, 3])
def test_all_gather_gives_every_rank_each_tree(world: int) -> None:
    for got in on_ranks(gathered_trees, world):
        for other, tree in enumerate(got):
            assert list(tree) == ["b", "a"] and tree["a"].tolist() == list(range(other))
            assert tree["b"].loss.shape == (other, 2) and (tree["b"].loss == other).all()
            assert tree["b"].texts[0].item() == 1j * other


@pytest.mark.parametrize("world", [2, 3])
def test_all_gather_refuses_other_trees_on_every_rank(world: int) -> None:
    for rank, got in enumerate(on_ranks(refused_trees, world)):
        own = "TypeError" if rank == world - 1 else "MismatchError"
        assert [got[name][0] for name in ("number", "array", "sparse")] == [own] * 3
        assert re.search(r"found float at value\['a'\]\[0\]\. Use all_gather_object", got["number"][1])
        assert re.search(r"found ndarray at value\.", got["array"][1])
        assert re.search(r"found a sparse_coo tensor .*at value\['a'\]", got["sparse"][1])
        assert got["keys"][0] == got["dtype"][0] == "MismatchError"
        assert re.search(r"value\['b'\]: .*; missing on rank", got["keys"][1])
        assert re.search(r"value\[0\]: float32.*; int32", got["dtype"][1])


def views() -> list[int]:
    rows = torch.zeros(500, 100)
    start = time.perf_counter()
    objects = all_gather_object([*rows])
    ordered = gather_exact([*rows], range(500 * get_rank(), 500 * (get_rank() + 1)), 500 * get_world_size())
    assert len(objects[0]) == 500 and len(ordered) == 500 * get_world_size()
    assert all(part.untyped_storage().nbytes() == 400 for part in [*objects[-1], *ordered])
    return [round(time.perf_counter() - start)]


def test_rows_of_a_tensor_travel_without_the_others() -> None:
    on_ranks(views, 2)
