"""A batch size that fits all ranks: memory runs out for real, where too much of it is asked for."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from torch import nn

import ddpkit
from ddpkit import DdpkitError, MismatchError
from ddpkit.guard import find_batch_size, is_out_of_memory


@pytest.mark.parametrize("ask", [lambda: torch.empty(1 << 52), lambda: np.empty(1 << 52)], ids=["torch", "numpy"])
def test_errors_for_want_of_memory_are_known(ask) -> None:
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        ask()
    assert is_out_of_memory(caught.value)
    assert not is_out_of_memory(RuntimeError("shapes do not fit"))
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("wrapped", [True, False])
def test_the_size_is_halved_on_all_until_it_fits_the_least_memory(wrapped: bool, rank: int, world_size: int) -> None:
    net: nn.Module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    if wrapped:
        net = ddpkit.wrap_model(net)
    limit = 100 if rank < world_size - 1 else 20  # samples for which there is memory
    sizes = []
    before = {name: buffer.clone() for name, buffer in net.named_buffers()}

    def trial(size: int) -> None:
        sizes.append(size)
        net(torch.randn(size, 2)).sum().backward()
        torch.empty((size // (limit + 1)) << 52)

    assert find_batch_size(trial, 128, net) == 16
    assert sizes == [128, 64, 32, 16]
    assert all(p.grad is None for p in net.parameters())
    for name, buffer in net.named_buffers():
        assert torch.equal(buffer, before[name])
    ddpkit.check_replicas(net)


@pytest.mark.ranks(1, 2)
def test_where_one_sample_is_too_large_all_ranks_raise(rank: int, world_size: int) -> None:
    def trial(size: int) -> None:
        if rank == world_size - 1:
            torch.empty(size << 52)

    with pytest.raises(DdpkitError, match="one sample does not fit in memory"):
        find_batch_size(trial, 4)


@pytest.mark.ranks(1, 2)
def test_other_errors_of_a_trial_are_raised_and_the_other_ranks_hear_of_them(rank: int, world_size: int) -> None:
    def trial(size: int) -> None:
        if rank == world_size - 1:
            raise KeyError("no such column")

    with pytest.raises(KeyError if rank == world_size - 1 else MismatchError, match=re.escape("no such column")):
        find_batch_size(trial, 4)


@pytest.mark.ranks(1, 2)
def test_an_error_for_want_of_memory_may_have_no_text(rank: int) -> None:
    def trial(size: int) -> None:
        if size > 4:
            raise MemoryError

    assert find_batch_size(trial, 16) == 4


@pytest.mark.ranks(2)
def test_ranks_that_begin_with_other_sizes_hear_of_it(rank: int) -> None:
    with pytest.raises(MismatchError, match="batch size: 8 on rank 0; 12 on rank 1"):
        find_batch_size(lambda size: None, 12 if rank else 8)


@pytest.mark.ranks(1, 2)
def test_a_size_that_is_none_is_refused(rank: int) -> None:
    with pytest.raises(ValueError, match="largest"):
        find_batch_size(lambda size: None, 0)
