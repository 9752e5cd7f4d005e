"""Tensors that are added up over all ranks, on both ways between them."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
from conftest import on_ranks
from torch import Tensor

import ddpkit
from ddpkit import get_rank
from ddpkit.collectives.sums import Sum, reduce_in_place

SMALL = 1 << 16  # elements, of what few ranks send to each other
SHAPES = [(0,), (1,), (3, 5), (SMALL,), (SMALL + 1,)]
DTYPES = [torch.float32, torch.float64, torch.int64, torch.complex64]


def tensor_of(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Make numbers whose sum depends on the order in which they are added."""
    generator = torch.Generator().manual_seed(rank)
    if not dtype.is_floating_point:
        return torch.randint(-(2**20), 2**20, shape, generator=generator).to(dtype)
    return torch.randn(shape, generator=generator, dtype=dtype) * 10.0**rank


def summed() -> list[Tensor]:
    return [reduce_in_place(tensor_of(get_rank(), shape, dtype)) for shape in SHAPES for dtype in DTYPES]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_sum_is_the_same_on_all_ranks_and_a_small_one_in_their_order(world: int) -> None:
    found = on_ranks(summed, world)
    cases = [(shape, dtype) for shape in SHAPES for dtype in DTYPES]
    for (shape, dtype), *sums in zip(cases, *found, strict=True):
        expected = tensor_of(0, shape, dtype)
        for rank in range(1, world):
            expected += tensor_of(rank, shape, dtype)
        if expected.numel() <= SMALL:
            assert torch.equal(sums[0], expected), (shape, dtype)
        torch.testing.assert_close(sums[0], expected)
        assert all(torch.equal(each, sums[0]) for each in sums), (shape, dtype)


def summed_at_once() -> list[Tensor]:
    tensors = [tensor_of(get_rank(), (size,), torch.float32) for size in (3, SMALL + 1, 7)]
    under_way = [Sum(tensor) for tensor in tensors]
    for each in reversed(under_way):
        each.wait()
    return tensors


def test_several_sums_may_be_under_way() -> None:
    for found in on_ranks(summed_at_once, 2):
        for tensor in found:
            shape = tuple(tensor.shape)
            expected = tensor_of(0, shape, torch.float32) + tensor_of(1, shape, torch.float32)
            torch.testing.assert_close(tensor, expected)


def in_different_calls() -> None:
    net = torch.nn.Linear(2, 1)
    net(torch.ones(1, 2)).sum().backward()
    with ddpkit.distributed(timeout=timedelta(seconds=3)):
        if get_rank() == 0:
            ddpkit.average_gradients(net)
        else:
            ddpkit.all_reduce_mean(1.0)


def test_ranks_in_different_calls_raise_and_are_not_aborted() -> None:
    """Messages of different sizes that meet in one of gloo's collectives end the process."""
    with pytest.raises(RuntimeError, match="Timed out"):
        ddpkit.spawn(in_different_calls, 2)
