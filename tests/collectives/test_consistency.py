"""The block with which each collective begins, on its ways between the ranks."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from unittest.mock import patch

import numpy as np
import pytest
import torch
from conftest import on_ranks
from test_ops import assert_all_raised, differing

import ddpkit
from ddpkit import all_reduce_mean, get_rank, get_world_size
from ddpkit.collectives.consistency import PAYLOAD, Numbers, add_up, fingerprint_of


def payload_of(rank: int) -> Numbers:
    """Make numbers whose sum depends on the order in which they are added, or is not finite."""
    numbers = np.random.default_rng(rank).normal(size=PAYLOAD) * 10.0**rank
    numbers[:4] = [-0.0, 1.7e308, np.inf, np.nan]
    return numbers


def summed(few: int) -> tuple[bytes, float]:
    with patch("ddpkit.collectives.consistency._FEW", few):
        sums = add_up(fingerprint_of("a test"), payload_of(get_rank()))
        mean = all_reduce_mean({"rank": get_rank()})["rank"]
    return sums.tobytes(), mean


def assert_in_order(world: int, few: int) -> None:
    expected = payload_of(0)
    with np.errstate(over="ignore"):
        for rank in range(1, world):
            expected += payload_of(rank)
    for block, mean in on_ranks(partial(summed, few), world):
        np.testing.assert_array_equal(np.frombuffer(block), expected)
        assert np.signbit(np.frombuffer(block)[0])  # of -0.0
        assert mean == (world - 1) / 2


@pytest.mark.parametrize("few", [1, 4])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_block_is_added_up_in_the_order_of_the_ranks(world: int, few: int) -> None:
    assert_in_order(world, few)


@pytest.mark.storm
def test_a_block_is_added_up_on_more_ranks_than_send_theirs_to_each_other() -> None:
    assert_in_order(6, 4)


def differing_on_many() -> object:
    assert get_world_size() > 1
    with patch("ddpkit.collectives.consistency._FEW", 1):
        return differing()


def test_ranks_that_differ_all_raise_where_rank_0_adds_the_blocks_up() -> None:
    assert_all_raised(on_ranks(differing_on_many, 3))


def in_different_calls() -> str:
    net = torch.nn.Linear(2, 1)
    net(torch.ones(1, 2)).sum().backward()
    try:
        with ddpkit.distributed(timeout=timedelta(seconds=3)):
            if get_rank() == 0:
                ddpkit.average_gradients(net)
            else:
                all_reduce_mean(1.0)
    except (RuntimeError, ddpkit.DdpkitError) as error:
        return f"raised {type(error).__name__}"
    return "went on"


def test_ranks_in_different_calls_raise_and_are_not_aborted() -> None:
    """Messages of different sizes that meet in one of gloo's collectives would end the process."""
    assert all(end.startswith("raised") for end in ddpkit.spawn(in_different_calls, 2))
