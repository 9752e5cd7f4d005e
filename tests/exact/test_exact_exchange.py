"""Exact sums over ranks: of the same bits as on one rank."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import ddpkit
from ddpkit.exact.gradients import ExactSum

SIZE, MOST = 21, 5


def vectors_of(rank: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Make vectors of very different sizes, of each rank one fewer than of the one before."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    found = torch.randn(max(0, MOST - rank), SIZE, generator=generator, dtype=torch.float64)
    return (found * 2.0 ** (20 * rank)).to(dtype)


def sum_of(vectors: Tensor) -> ExactSum:
    total = ExactSum(vectors.shape[1], torch.device("cpu"))
    for vector in vectors:
        total.add(vector)
    return total


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_sum_is_that_of_one_rank(dtype: torch.dtype, rank: int) -> None:
    ranks = ddpkit.get_world_size()
    for seed in range(3):
        total = sum_of(vectors_of(rank, dtype, seed))
        counts = total.over_ranks("a sum", [rank, 1], None)
        everyone = torch.cat([vectors_of(each, dtype, seed) for each in range(ranks)])
        assert torch.equal(total.rounded(), sum_of(everyone).rounded())
        assert counts.tolist() == [sum(range(ranks)), ranks]


@pytest.mark.ranks(2, 3)
def test_a_number_that_is_not_finite_spoils_its_element_on_all(rank: int) -> None:
    vector = torch.ones(SIZE)
    vector[13] = torch.inf
    total = sum_of(vector.expand(1 if rank == 0 else 0, SIZE))
    total.over_ranks("a sum", [], None)
    found = total.rounded()
    assert found.isnan().nonzero().tolist() == [[13]]
    assert (found[:13] == 1).all()


@pytest.mark.ranks(1, 2, 3)
def test_a_model_without_elements_has_an_empty_sum(rank: int) -> None:
    total = sum_of(torch.ones(1, 0))
    total.over_ranks("a sum", [], None)
    assert total.rounded().shape == (0,)
