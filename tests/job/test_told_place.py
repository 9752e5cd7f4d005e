"""A place in the job that the script tells, by a launch."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import free_port
from test_groups_of_others import place

import ddpkit
from ddpkit import Launch

SOON = timedelta(seconds=20)


def told_place(port: int, world_size: int) -> Launch:
    """The argument of setup() that says who this process is; the environment does not."""
    return Launch("platform", place()[0], world_size, master_addr="127.0.0.1", master_port=port)


def joined_twice(port: int, world_size: int) -> list[Any]:
    told = told_place(port, world_size)
    found = []
    for _ in range(2):
        asked: list[int] = []
        choose = lambda local_rank, asked=asked: asked.append(local_rank) or "cpu"  # noqa: E731
        context = ddpkit.setup(launch=told, device=choose, timeout=SOON)
        assert ddpkit.setup(launch=told, device=choose) == context and ddpkit.get_device() == torch.device("cpu")
        mean = ddpkit.all_reduce_mean(float(ddpkit.get_rank()))
        found.append((context.rank, context.world_size, context.launcher, mean, asked[0]))
        with pytest.raises(ValueError, match=f"is already rank {context.rank} of {world_size}"):
            ddpkit.setup(launch=Launch("platform", 7, 8, master_addr="localhost", master_port=1))
        ddpkit.barrier()
        ddpkit.teardown()
    return found


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_place_that_is_told_is_taken_again_and_again(world_size: int) -> None:
    for rank, found in enumerate(ddpkit.spawn(joined_twice, world_size, free_port(), world_size)):
        assert found == [(rank, world_size, "platform", (world_size - 1) / 2, rank)] * 2


def failing(port: int) -> str:
    try:
        with ddpkit.distributed(launch=told_place(port, 2), timeout=SOON):
            if ddpkit.get_rank() == 1:
                raise ValueError("no such file")
            ddpkit.barrier()
    except (ValueError, ddpkit.PeerError) as error:
        return str(error)
    return ""


def test_a_failure_is_told_as_in_any_other_job() -> None:
    first, second = ddpkit.spawn(failing, 2, free_port())
    assert second == "no such file" and "rank 1" in first and "no such file" in first


def one_with_a_bad_option(port: int, bad: int) -> tuple[str, float]:
    told = told_place(port, 3)
    begun = time.monotonic()
    try:
        ddpkit.setup(launch=told, timeout=SOON, num_threads=0 if told.rank == bad else None)
    except (ValueError, ddpkit.LaunchError) as error:
        return str(error), time.monotonic() - begun
    return "", 0.0


@pytest.mark.parametrize("bad", [0, 1])
def test_a_bad_option_on_one_rank_is_told_to_all_at_once(bad: int) -> None:
    for rank, (text, seconds) in enumerate(ddpkit.spawn(one_with_a_bad_option, 3, free_port(), bad)):
        assert "num_threads must be a positive integer, got 0" in text
        assert rank == bad or f"Rank {bad} on" in text
        assert seconds < 60  # and not the time-out


def failing_to_choose(port: int) -> str:
    told = told_place(port, 2)

    def choose(local_rank: int) -> str:
        return ["cpu", "cup"][local_rank]

    try:
        ddpkit.setup(launch=told, timeout=SOON, device=choose)
    except (ValueError, ddpkit.LaunchError) as error:
        return str(error)
    return ""


def test_a_device_that_is_none_ends_all_ranks() -> None:
    for text in ddpkit.spawn(failing_to_choose, 2, free_port()):
        assert "rank 1: device='cup' is not a device" in text


def place_of(**fields: Any) -> Launch:
    return Launch(**{"kind": "platform", "rank": 0, "world_size": 2, "master_addr": "a", "master_port": 1} | fields)


@pytest.mark.parametrize(
    ("told", "error", "message"),
    [
        ({"launch": place_of(rank=2)}, ValueError, "rank is 2 and world_size is 2"),
        ({"launch": place_of(rank=True)}, ValueError, "rank must be an integer"),
        ({"launch": 3}, TypeError, "launch must be a ddpkit.Launch, got int"),
        ({"launch": place_of(master_addr=None)}, ValueError, "needs master_addr and master_port"),
        ({"launch": place_of(rank="0")}, ValueError, "rank must be an integer of at least 0, got '0'"),
        ({"launch": place_of(rank=None)}, ValueError, "rank is None and world_size is 2"),
    ],
)
def test_what_does_not_tell_a_place_is_refused(told: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ddpkit.setup(**told)
    assert not dist.is_initialized()
