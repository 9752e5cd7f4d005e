"""Exact sums over ranks: of the same bits as on one rank, whatever travels and however the elements are divided."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import ddpkit
from ddpkit.exact import sum as exact_exchange
from ddpkit.exact.sum import ExactExchange, ExactSum, Layout

SIZES = (5, 0, 1, 12, 3)  # of pieces: neither two nor three ranks divide them evenly


class Way(NamedTuple):
    """What travels: `most` vectors of a rank to all ranks, or their parts; or the digits of sums."""

    most: int
    small: int


WAYS = {
    "vectors to all": Way(4, 1 << 20),
    "many vectors to all": Way(11, 1 << 20),
    "vectors in parts": Way(4, 0),
    "one vector in parts": Way(1, 0),
    "digits": Way(5, 0),
    "digits of many": Way(11, 0),
}


def vectors_of(rank: int, most: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Make vectors of very different sizes, of each rank one fewer than of the one before."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    found = torch.randn(max(0, most - rank), sum(SIZES), generator=generator, dtype=torch.float64)
    return (found * 2.0 ** (20 * rank)).to(dtype)


def summed(vectors: Tensor, result: torch.dtype) -> Tensor:
    total = ExactSum(torch.empty(2, vectors.shape[1], dtype=torch.float64))
    if len(vectors):
        total.add(vectors)
    return total.rounded().to(result)


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("way", WAYS)
def test_the_sum_is_that_of_one_rank(way: str, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    most, small = WAYS[way]
    monkeypatch.setattr(exact_exchange, "_SMALL", small)
    ranks = ddpkit.get_world_size()
    float32, float64 = torch.float32, torch.float64
    for dtype, result in [(float32, float32), (float32, torch.bfloat16), (float64, float64)]:
        exchange = ExactExchange(Layout(SIZES, most, ranks, dtype, result, torch.device("cpu")))
        for seed in range(3):  # in the same memory
            exchange.clear()
            for vector in vectors_of(rank, most, dtype, seed):
                exchange.add(list(vector.split(SIZES)))
            total, is_complete = exchange.total("a sum", rank != 1 or seed != 1, None)
            everyone = torch.cat([vectors_of(each, most, dtype, seed) for each in range(ranks)])
            assert torch.equal(total, summed(everyone, result))
            assert is_complete == (ranks == 1 or seed != 1)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("way", WAYS)
def test_a_number_that_is_not_finite_spoils_its_element_on_all(
    way: str, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    most, small = WAYS[way]
    monkeypatch.setattr(exact_exchange, "_SMALL", small)
    layout = Layout(SIZES, most, ddpkit.get_world_size(), torch.float32, torch.float32, torch.device("cpu"))
    exchange = ExactExchange(layout)
    exchange.clear()
    if rank == 0:
        vector = torch.ones(sum(SIZES))
        vector[13] = torch.inf
        exchange.add(list(vector.split(SIZES)))
    total, _ = exchange.total("a sum", True, None)
    assert total.isnan().nonzero().tolist() == [[13]]
    assert (total[:13] == 1).all()


@pytest.mark.ranks(1, 2, 3)
def test_a_model_without_elements_has_an_empty_sum(rank: int) -> None:
    exchange = ExactExchange(
        Layout((0,), 2, ddpkit.get_world_size(), torch.float32, torch.float32, torch.device("cpu"))
    )
    exchange.clear()
    exchange.add([torch.ones(0)])
    total, _ = exchange.total("a sum", True, None)
    assert total.shape == (0,)
