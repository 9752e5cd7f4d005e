"""Groups that somebody else makes, destroys or makes anew: the rank is that of the group that exists."""

from __future__ import annotations

import logging
import os
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import on_ranks
from processes import platform_env, run

import ddpkit
from ddpkit.job import current_job

SOON = timedelta(seconds=120)
HINTS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "DDPKIT_SPAWN")


def place() -> tuple[int, str, str | None]:
    """Return this process's rank and where the ranks of a test meet, and hide it from the library."""
    rank, address = int(os.environ["RANK"]), f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    for name in HINTS:
        del os.environ[name]
    return rank, *address.split(":")


def make_group(rank: int, world_size: int, address: str, port: str, name: str) -> None:
    store = dist.TCPStore(address, int(port), is_master=False)
    dist.init_process_group("gloo", store=dist.PrefixStore(name, store), rank=rank, world_size=world_size)


def destroy_group() -> None:
    time.sleep(0.1)  # torch 2.6 destroys with the interpreter's lock, which gloo may need to drop a tensor
    dist.destroy_process_group()


def told() -> tuple[Any, ...]:
    """What the library says of this process, and computes."""
    record = logging.makeLogRecord({"levelno": logging.INFO})
    speaks = ddpkit.RankFilter().filter(record)
    sampler = ddpkit.DistributedSampler(range(8))
    here = (ddpkit.get_rank(), ddpkit.get_world_size(), ddpkit.is_main_process(), ddpkit.is_distributed())
    assert (record.rank, record.world_size, speaks) == here[:3]
    assert (sampler.rank, sampler.num_replicas) == here[:2]
    mean = ddpkit.all_reduce_mean(float(ddpkit.get_rank()))
    ddpkit.barrier()
    return *here, mean, ddpkit.get_local_rank(), len(ddpkit.all_gather_object(None))


def expected(rank: int, world_size: int) -> tuple[Any, ...]:
    mean = (world_size - 1) / 2
    return rank, world_size, rank == 0, world_size > 1, mean, rank, world_size


def single_then_group() -> list[Any]:
    where = place()
    context = ddpkit.setup(timeout=SOON)
    before = told()
    world_size = 2
    make_group(where[0], world_size, *where[1:], "one")
    early = (ddpkit.get_rank(), ddpkit.get_world_size())
    with pytest.raises(ddpkit.NotSetUpError, match="destroyed or replaced"):
        ddpkit.all_reduce(1.0)
    again = ddpkit.setup()
    after = told()
    assert (context.world_size, again.world_size, again.backend) == (1, world_size, "gloo")
    destroy_group()
    return [before, early, after]


def test_a_group_that_is_made_after_setup_on_one_process_is_joined_by_another_setup() -> None:
    for rank, found in enumerate(ddpkit.spawn(single_then_group, 2)):
        assert found == [expected(0, 1), (rank, 2), expected(rank, 2)]


def adopt_without_backend() -> str | None:
    rank, world_size = os.environ["RANK"], os.environ["WORLD_SIZE"]
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
    dist.init_process_group(store=dist.PrefixStore("theirs", store), rank=int(rank), world_size=int(world_size))
    with ddpkit.distributed() as context:
        assert ddpkit.all_reduce(1.0) == context.world_size
        return context.backend


def test_a_group_that_was_made_without_naming_a_backend_has_torchs_default() -> None:
    for backend in ddpkit.spawn(adopt_without_backend, 2):
        assert "cpu:gloo" in str(backend)


def three_then_two() -> list[Any]:
    rank, *where = place()
    results = []
    for number, world_size in enumerate((3, 2, 3, 1)):
        if rank < world_size:
            make_group(rank, world_size, *where, f"attempt {number}")
            if number:  # the first is adopted by itself
                ddpkit.setup(timeout=SOON)
            results.append(told())
            destroy_group()
    return results


def test_a_group_that_its_owner_makes_anew_is_adopted_by_setup() -> None:
    """As elastic training does: 3 ranks, then 2, and 3 again."""
    found = ddpkit.spawn(three_then_two, 3)
    for rank, results in enumerate(found):
        assert results == [expected(rank, size) for size in (3, 2, 3, 1) if rank < size]


def kept_over_groups() -> list[str]:
    """The errors of what was made in a group of three, looped over alone and in a group of two."""
    rank, *where = place()
    found: list[str] = []

    def try_all(made: dict[str, Any]) -> None:
        for name, one in made.items():
            try:
                found.append(f"{name} {len(list(one))}")
            except ddpkit.DdpkitError as error:
                found.append(f"{name} {error}")

    def make() -> dict[str, Any]:
        sampler = ddpkit.DistributedSampler(range(6))
        return {
            "sampler": sampler,
            "evaluation": ddpkit.DistributedEvalSampler(range(6)),
            "weighted": ddpkit.DistributedWeightedSampler([1.0] * 6, 6),
            "loader": ddpkit.make_loader(range(6), batch_size=1),
            "own": ddpkit.make_loader(range(6), batch_size=1, sampler=sampler),
            "chosen": ddpkit.DistributedSampler(range(6), num_replicas=2, rank=0),
        }

    make_group(rank, 3, *where, "three")
    made = make()
    try_all(made)
    dist.barrier()  # a rank that leaves closes its connections, also to those that still make theirs
    destroy_group()
    try_all(made)  # the last group's rank stays
    if rank < 2:
        make_group(rank, 2, *where, "two")
        try_all(made)
        try_all(make())
        dist.barrier()
        destroy_group()
    return found


def test_what_deals_samples_is_not_used_with_other_ranks_than_it_was_made_for() -> None:
    names = ("sampler", "evaluation", "weighted", "loader", "own")
    fine = [f"{name} 2" for name in names] + ["chosen 3"]
    for rank, found in enumerate(ddpkit.spawn(kept_over_groups, 3)):
        assert found[:12] == fine * 2
        if rank == 2:
            continue
        for name, text in zip(names, found[12:17], strict=True):
            assert text.startswith(name) and f"was made for rank {rank} of 3, but this is now rank {rank} of 2" in text
        assert found[17:] == ["chosen 3", *(f"{name} 3" for name in names), "chosen 3"]


def restarted_with_other_ranks() -> list[Any]:
    rank, *where = place()
    results = []
    for number in range(2):
        make_group((rank + number) % 2, 2, *where, f"attempt {number}")
        told_before = (ddpkit.get_rank(), ddpkit.is_main_process())
        ddpkit.setup(timeout=SOON)
        results.append((*told_before, told()[0]))
        destroy_group()
        results.append(ddpkit.is_main_process())
    return results


def test_the_rank_is_that_of_the_last_group() -> None:
    first, second = ddpkit.spawn(restarted_with_other_ranks, 2)
    assert first == [(0, True, 0), True, (1, False, 1), False]
    assert second == [(1, False, 1), False, (0, True, 0), True]


def destroy(make: str) -> list[str]:
    if make == "theirs":
        make_group(*(where := place())[:1], int(os.environ.get("SIZE", 2)), *where[1:], "theirs")
        ddpkit.all_reduce(1.0)
    else:
        ddpkit.setup(timeout=SOON)
    rank = ddpkit.get_rank()
    destroy_group()
    assert ddpkit.get_rank() == rank, "a script asks for it at its end"
    errors = []
    for call in (lambda: ddpkit.all_reduce_mean(1.0), ddpkit.barrier, lambda: ddpkit.broadcast(1)):
        with pytest.raises(ddpkit.NotSetUpError) as raised:
            call()
        errors.append(str(raised.value))
    return errors


@pytest.mark.parametrize("make", ["ours", "theirs"])
def test_a_group_that_is_destroyed_is_named_in_the_next_collective(make: str) -> None:
    for errors in ddpkit.spawn(destroy, 2, make):
        for error in errors:
            assert "group of this job, of 2 ranks, was destroyed" in error
            assert "teardown()" in error


def ours_then_theirs() -> tuple[Any, ...]:
    where = (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"])
    ddpkit.setup(timeout=SOON)
    rank = ddpkit.get_rank()
    destroy_group()
    make_group(1 - rank, 2, *where, "theirs")
    ddpkit.setup(timeout=SOON)
    found = told()[:5]
    theirs = dist.group.WORLD
    ddpkit.teardown()
    assert dist.group.WORLD is theirs, "it is not ours to destroy"
    destroy_group()
    return rank, found


def test_our_group_replaced_by_somebody_elses_is_left_and_theirs_joined() -> None:
    for rank, found in ddpkit.spawn(ours_then_theirs, 2):
        assert found == expected(1 - rank, 2)[:5]


def set_up_again() -> list[float]:
    sums = []
    for _ in range(3):
        with ddpkit.distributed(timeout=SOON):
            sums.append(ddpkit.all_reduce(1.0))
            destroy_group()
        ddpkit.setup(timeout=SOON)
        destroy_group()
    ddpkit.setup(timeout=SOON)
    sums.append(ddpkit.all_reduce(1.0))
    return sums


def test_setup_after_the_group_was_destroyed_joins_again() -> None:
    assert ddpkit.spawn(set_up_again, 2) == [[2.0] * 4] * 2


def fork_and_ask() -> tuple[int, str]:
    ddpkit.setup(timeout=SOON)
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        try:
            ddpkit.barrier()
        except ddpkit.LaunchError as error:
            os.write(write, f"{ddpkit.get_rank()} {error}".encode())
        os._exit(0)
    os.waitpid(child, 0)
    ddpkit.barrier()
    return ddpkit.get_rank(), os.read(read, 1000).decode()


def test_a_forked_child_has_the_rank_but_is_none() -> None:
    for rank, text in ddpkit.spawn(fork_and_ask, 2):
        assert text.startswith(f"{rank} This process was forked from a rank"), text


def replace_while_a_model_holds_it() -> list[float]:
    where = (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"])
    ddpkit.setup(timeout=SOON)
    model = ddpkit.wrap_model(torch.nn.Linear(1, 1))  # DDP keeps the group alive
    rank = ddpkit.get_rank()
    destroy_group()
    with pytest.raises(ddpkit.NotSetUpError, match="destroyed"):
        ddpkit.barrier()
    make_group(rank, 2, *where, "theirs")
    ddpkit.setup(timeout=SOON)
    total = ddpkit.all_reduce(1.0)
    destroy_group()
    return [total, float(isinstance(model, torch.nn.Module))]


def test_a_destroyed_group_is_noticed_also_when_a_model_keeps_it() -> None:
    assert ddpkit.spawn(replace_while_a_model_holds_it, 2) == [[2.0, 1.0]] * 2


def say_what_was_adopted() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s", force=True)
    where = place()
    make_group(where[0], 2, *where[1:], "theirs")
    ddpkit.all_reduce(1.0)
    ddpkit.all_reduce(1.0)
    destroy_group()


def test_an_adoption_without_setup_says_once_that_there_is_no_watch() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    envs = [
        platform_env(rank, 2, store.port, LOCAL_RANK="0", LOCAL_WORLD_SIZE="2", DDPKIT_SPAWN="1") for rank in (0, 1)
    ]
    first, second = run(say_what_was_adopted, envs)
    assert (first.code, second.code) == (0, 0), (first, second)
    assert first.output.count("without a watch") == 1 and "call ddpkit.setup() on every rank" in first.output
    assert "without a watch" not in second.output


def time_the_check() -> float:
    job = current_job.job
    assert job is not None and job.is_current()
    times = []
    for _ in range(20):
        start = time.thread_time()
        for _ in range(1000):
            job.is_current()
        times.append((time.thread_time() - start) / 1000)
    return min(times)


def test_the_look_at_the_group_is_cheap() -> None:
    assert max(on_ranks(time_the_check, 2)) < 2e-6
