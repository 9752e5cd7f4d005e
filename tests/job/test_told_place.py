"""A place in the job that the script tells: by a launch, or by a store with rank and world size."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import free_port
from test_groups_of_others import place

import ddpkit
from ddpkit import Launch

SOON = timedelta(seconds=20)


def told_by(way: str, folder: Path, world_size: int) -> dict[str, Any]:
    """The arguments of setup() that say who this process is; the environment does not."""
    rank, address, port = place()
    if way == "launch":
        port = (folder / "port").read_text()
        return {"launch": Launch("platform", rank, world_size, master_addr="127.0.0.1", master_port=int(port))}
    store: dist.Store = dist.FileStore(str(folder / "store"), world_size)
    if way == "tcp":
        store = dist.TCPStore(address, int(port or 0), is_master=False)
    return {"store": store, "rank": rank, "world_size": world_size}


def joined_twice(way: str, folder: Path, world_size: int) -> list[Any]:
    told = told_by(way, folder, world_size)
    found = []
    for _ in range(2):
        asked: list[int] = []
        choose = lambda local_rank, asked=asked: asked.append(local_rank) or "cpu"  # noqa: E731
        context = ddpkit.setup(**told, device=choose, timeout=SOON)
        assert ddpkit.setup(**told, device=choose) == context and ddpkit.get_device() == torch.device("cpu")
        mean = ddpkit.all_reduce_mean(float(ddpkit.get_rank()))
        found.append((context.rank, context.world_size, context.launcher, mean, asked[0]))
        with pytest.raises(ValueError, match=f"is rank {context.rank} of {world_size} already"):
            ddpkit.setup(launch=Launch("platform", 7, 8, master_addr="localhost", master_port=1))
        ddpkit.barrier()
        ddpkit.teardown()
    return found


@pytest.mark.parametrize(("way", "world_size"), [("file", 1), ("file", 3), ("tcp", 2), ("launch", 1), ("launch", 2)])
def test_a_place_that_is_told_is_taken_again_and_again(way: str, world_size: int, tmp_path: Path) -> None:
    (tmp_path / "port").write_text(str(free_port()))
    for rank, found in enumerate(ddpkit.spawn(joined_twice, world_size, way, tmp_path, world_size)):
        assert found == [(rank, world_size, "platform", (world_size - 1) / 2, rank)] * 2


def failing(folder: Path) -> str:
    told = told_by("file", folder, 2)
    try:
        with ddpkit.distributed(**told, timeout=SOON):
            if ddpkit.get_rank() == 1:
                raise ValueError("no such file")
            ddpkit.barrier()
    except (ValueError, ddpkit.PeerError) as error:
        return str(error)
    return ""


def test_a_failure_is_told_as_in_any_other_job(tmp_path: Path) -> None:
    first, second = ddpkit.spawn(failing, 2, tmp_path)
    assert second == "no such file" and "rank 1" in first and "no such file" in first


def one_with_a_bad_option(way: str, folder: Path, bad: int) -> tuple[str, float]:
    told = told_by(way, folder, 3)
    rank = told["rank"] if "rank" in told else told["launch"].rank
    begun = time.monotonic()
    try:
        ddpkit.setup(**told, timeout=SOON, num_threads=0 if rank == bad else None)
    except (ValueError, ddpkit.LaunchError) as error:
        return str(error), time.monotonic() - begun
    return "", 0.0


@pytest.mark.parametrize(("way", "bad"), [("file", 0), ("launch", 1)])
def test_a_bad_option_on_one_rank_is_told_to_all_at_once(way: str, bad: int, tmp_path: Path) -> None:
    (tmp_path / "port").write_text(str(free_port()))
    for rank, (text, seconds) in enumerate(ddpkit.spawn(one_with_a_bad_option, 3, way, tmp_path, bad)):
        assert "num_threads must be a positive integer, got 0" in text
        assert rank == bad or f"Rank {bad} on" in text
        assert seconds < 60  # and not the time-out


def failing_to_choose(folder: Path) -> str:
    told = told_by("file", folder, 2)

    def choose(local_rank: int) -> str:
        return ["cpu", "cup"][local_rank]

    try:
        ddpkit.setup(**told, timeout=SOON, device=choose)
    except (ValueError, ddpkit.LaunchError) as error:
        return str(error)
    return ""


def test_a_device_that_is_none_ends_all_ranks(tmp_path: Path) -> None:
    for text in ddpkit.spawn(failing_to_choose, 2, tmp_path):
        assert "rank 1: device='cup' is no device" in text


def place_of(**fields: Any) -> Launch:
    return Launch(**{"kind": "platform", "rank": 0, "world_size": 2, "master_addr": "a", "master_port": 1} | fields)


@pytest.mark.parametrize(
    ("told", "error", "message"),
    [
        ({"rank": 0}, TypeError, "rank and world_size go with a store"),
        ({"store": dist.HashStore()}, TypeError, "does not say who this process is"),
        ({"store": "file:///tmp/x", "rank": 0, "world_size": 1}, TypeError, "store must be one of torch"),
        ({"store": dist.HashStore(), "rank": 2, "world_size": 2}, ValueError, "rank is 2 and world_size is 2"),
        ({"store": dist.HashStore(), "rank": True, "world_size": 2}, ValueError, "rank must be an integer"),
        ({"store": dist.HashStore(), "launch": place_of()}, TypeError, "but not both"),
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
