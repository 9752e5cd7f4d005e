from __future__ import annotations

import gc
import os
import re
import resource

import pytest
from processes import free_port, platform_env, run

import ddpkit
from ddpkit.job.job import Options
from ddpkit.job.joining import check_open_files
from ddpkit.launch.launch import Launch


def limited(files: int) -> None:
    """Lowers the limit of this process to so many files more than it has open."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/dev/fd")) + files, hard))


def join_with_few_files() -> None:
    if os.environ["RANK"] == "0":
        limited(24)
    with ddpkit.distributed():
        pass


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rank_that_may_not_open_enough_files_is_named_on_every_rank(world_size: int) -> None:
    port = free_port()
    ended = run(join_with_few_files, [platform_env(rank, world_size, port) for rank in range(world_size)])
    for end in ended:
        assert end.code == 1
        found = re.search(rf"Rank 0 of {world_size} needs about (\d+) open files.* the limit is (\d+)", end.output)
        assert found and int(found[2]) < int(found[1])
        assert "ulimit -n" in end.output


def join_at_the_limit(spare: int) -> None:
    if os.environ["RANK"] == "0":
        limited(24 + 3 * (ddpkit.detect_launch(os.environ).world_size - 1) + spare)
    with ddpkit.distributed():
        ddpkit.barrier()


@pytest.mark.parametrize("world_size", [2, 3])
def test_what_a_rank_is_said_to_need_is_enough(world_size: int) -> None:
    port = free_port()
    ended = run(join_at_the_limit, [platform_env(rank, world_size, port) for rank in range(world_size)], 1)
    assert [end.code for end in ended] == [0] * world_size, ended


@pytest.mark.parametrize(
    ("rank", "asked", "kind", "connections"),
    [
        (0, Options(), "platform", 2 * 999 + 63),
        (1, Options(), "platform", 999 + 63),
        (16, Options(), "platform", 999),
        (0, Options(watch=False), "platform", 2 * 999),
        (0, Options(backend="cpu:gloo,cuda:nccl"), "platform", 2 * 999 + 63),
        (0, Options(backend="nccl"), "platform", 999 + 63),
        (1, Options(backend="nccl"), "platform", 63),
        (16, Options(backend="nccl"), "platform", 0),
        (0, Options(), "spawn", 999 + 63),
    ],
)
def test_a_rank_needs_the_connections_of_its_store_its_watch_and_its_group(
    rank: int, asked: Options, kind: str, connections: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = Launch(kind, rank, 1000)
    gc.collect()  # what earlier tests have left may hold some
    few = len(os.listdir("/dev/fd")) + 24
    for limit, enough in ((few + connections - 10, False), (few + connections + 10, True), (-1, True)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, limit=limit: (limit, limit))
        if enough:
            check_open_files(launch, asked)
            continue
        with pytest.raises(ddpkit.LaunchError, match=f"but the limit is {limit}"):
            check_open_files(launch, asked)
