"""Gathering, broadcasting and evaluation results in order, on real ranks."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from conftest import on_ranks
from test_collectives import last, raised
from torch import nn

from ddpkit import all_gather, all_gather_object, broadcast, gather_exact, get_rank, get_world_size


@dataclass(frozen=True)
class Config:
    name: str
    layers: list[Any]


def gathered() -> dict[str, Any]:
    rank = get_rank()
    grown = torch.arange(2.0 * rank).reshape(rank, 2).requires_grad_()
    kinds = (torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float16, torch.complex64, torch.uint16)
    typed = [(kind, all_gather(torch.tensor([rank, 1]).to(kind))) for kind in kinds]
    with patch("ddpkit.gathering.ROOM", 1):  # as on more ranks than the first block has room for
        crowded = all_gather(torch.arange(rank))
    return {
        "uneven": all_gather(grown),
        "scalar": all_gather(torch.tensor(rank)),
        "crowded": crowded,
        "empty": all_gather(torch.zeros(0, 3)),
        "no columns": all_gather(torch.zeros(rank, 0)),
        "transposed": all_gather(torch.arange(6).reshape(2, 3).T + rank),
        "dtypes": [[x.to(torch.complex128) for x in each if x.dtype == kind] for kind, each in typed],
        "conjugate": all_gather(torch.tensor([1j * rank]).conj()),
        "objects": all_gather_object({"rank": rank, "text": "x" * 5000 * rank, "none": None}),
    }


@pytest.mark.parametrize("world", [1, 2, 3])
def test_all_gather_gives_every_rank_each_tensor_as_it_was(world: int) -> None:
    for got in on_ranks(gathered, world):
        for other in range(world):
            uneven = got["uneven"][other]
            assert torch.equal(uneven, torch.arange(2.0 * other).reshape(other, 2)) and not uneven.requires_grad
            assert got["scalar"][other].shape == () and got["scalar"][other].item() == other
            assert got["crowded"][other].tolist() == list(range(other))
            assert got["empty"][other].shape == (0, 3) and got["no columns"][other].shape == (other, 0)
            assert torch.equal(got["transposed"][other], torch.arange(6).reshape(2, 3).T + other)
            assert [tensors[other].tolist() for tensors in got["dtypes"]] == [[bool(other), 1], *[[other, 1]] * 6]
            assert got["conjugate"][other].tolist() == [-1j * other]
            assert got["objects"][other] == {"rank": other, "text": "x" * 5000 * other, "none": None}
        assert {len(each) for name, each in got.items() if name != "dtypes"} == {world}


def a_value(rank: int) -> dict[str, Any]:
    shared = torch.arange(3) + rank
    return {
        "config": Config(name="mse", layers=[1, (2.5, None), {"lr": 1e-3, "deep": {True: b"bytes"}}]),
        "tensors": [
            shared,
            shared,
            torch.ones(300, 20, requires_grad=True) * rank,
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
    model = nn.Linear(3, 2)
    with torch.no_grad():
        model.weight.fill_(rank)
    other = broadcast(model if rank == 0 else None)
    assert [type(p) for p in other.parameters()] == [nn.Parameter] * 2 and other.weight.unique().tolist() == [0.0]
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
        assert all(seconds < 1 for _, _, seconds in got.values())
        assert f"1 repeated: 0 on ranks 0, {last}\n" in got["repeated"][1]
        assert "4 missing: 2, 3, 4, 6\n" in got["missing"][1] and "range(7)" in got["missing"][1]
        assert f"2 out of range: -4 on rank {last}, 2 on rank {last}\n" in got["out of range"][1]
        assert "DistributedEvalSampler" in got["repeated"][1]
        assert re.search(r"float32 tensor of shape \(any\) and int32 tensor of shape \(any\)", got["dtype"][1])
        assert re.search(r"\(any, 3\) and .*\(any, 2\)", got["shape"][1])
        assert re.search(r"float64 array of shape \(any\) and a list", got["kind"][1])


@pytest.mark.parametrize("indices", [[0, 0], [0, 2], [1], [0, 1, 1], [0.0, 1.0], [[0], [1]], [True, False]])
def test_gather_exact_on_one_process_refuses_wrong_indices(indices: Any) -> None:
    with pytest.raises(ValueError, match=r"exactly|range\(2\)|indices must be 2 ints"):
        gather_exact([10, 20], indices, n=2)
