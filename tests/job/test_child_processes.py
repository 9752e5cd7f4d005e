"""Processes that a rank starts: they inherit its environment, join nothing, and harm nobody."""

from __future__ import annotations

import gc
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import Ended, free_port, platform_env, run

import ddpkit
from ddpkit import testing

LONG = timedelta(seconds=300)  # a rank waits while the other one starts programs
REFUSED = "of a running job"
LAUNCHERS = ["platform", pytest.param("torchrun", marks=pytest.mark.storm)]
CHILD = """
import sys, datetime, ddpkit
context = ddpkit.setup(timeout=datetime.timedelta(seconds=300))
print("alone" if context.world_size == 1 else "joined", ddpkit.all_reduce(1.0), flush=True)
"""


def agent_env(rank: int, world_size: int, port: int) -> dict[str, str]:
    elastic = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "test", "GROUP_WORLD_SIZE": "1"}
    elastic |= {"LOCAL_RANK": f"{rank}", "LOCAL_WORLD_SIZE": f"{world_size}", "GROUP_RANK": "0"}
    return platform_env(rank, world_size, port, **elastic)


def run_job(world_size: int, launcher: str, fn: Any, *args: Any) -> list[Ended]:
    if launcher == "platform":
        port = free_port()
        return run(fn, [platform_env(rank, world_size, port) for rank in range(world_size)], *args)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return run(fn, [agent_env(rank, world_size, store.port) for rank in range(world_size)], *args)


def start_program(**changes: str) -> str:
    env = os.environ | changes
    done = subprocess.run([sys.executable, "-c", CHILD], env=env, capture_output=True, text=True, timeout=300)
    return done.stdout + done.stderr


def try_to_join(queue: Any = None) -> str:
    try:
        said = f"joined {ddpkit.setup(timeout=LONG).world_size}"
    except ddpkit.LaunchError as error:
        said = str(error)
    if queue is not None:
        queue.put(said)
    return said


def start_child(method: str) -> str:
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    child = context.Process(target=try_to_join, args=(queue,))
    child.start()
    said = queue.get(timeout=300)
    child.join()
    return str(said)


class Joining(torch.utils.data.Dataset[str]):
    """A dataset whose samples are what a loader's worker hears when it joins."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> str:
        return try_to_join()


def start_worker() -> str:
    loader = torch.utils.data.DataLoader(Joining(), num_workers=1, multiprocessing_context="spawn")
    return str(next(iter(loader))[0])


STARTS = {
    "a program": start_program,
    "spawn": lambda: start_child("spawn"),
    "forkserver": lambda: start_child("forkserver"),
    "a loader's worker": start_worker,
    "a program with another rank": lambda: start_program(RANK="1", LOCAL_RANK="1"),
    "a program that is told to be one of more": lambda: start_program(RANK="5", WORLD_SIZE="6", LOCAL_WORLD_SIZE="6"),
    "a program with nonsense": lambda: start_program(RANK="7"),
}


def work(who: int | None, starts: list[str]) -> None:
    with ddpkit.distributed(timeout=LONG) as context:
        sums = [ddpkit.all_reduce(1.0)]
        if who in (None, context.rank):
            for name in starts:
                said = STARTS[name]()
                assert REFUSED in said or (name == "a program with nonsense" and "is not below WORLD_SIZE" in said), (
                    said
                )
                assert name != "a program" or re.search("start it without .*RANK, WORLD_SIZE", said), said
        ddpkit.barrier()
        sums.append(ddpkit.all_reduce(1.0))
        assert sums == [context.world_size] * 2
    time.sleep(0.5)  # nobody is told afterwards either
    print("well")


@pytest.mark.parametrize(
    ("launcher", "who", "starts"),
    [
        ("platform", 0, ["a program", "forkserver"]),
        pytest.param(
            "platform", 0, ["a program with another rank", "a program with nonsense"], marks=pytest.mark.storm
        ),
        pytest.param(
            "platform",
            1,
            ["a program", "a loader's worker", "a program that is told to be one of more"],
            marks=pytest.mark.storm,
        ),
        pytest.param("torchrun", 0, ["a program", "spawn", "a program with another rank"], marks=pytest.mark.storm),
        pytest.param("torchrun", 1, ["a program", "spawn", "a program with nonsense"], marks=pytest.mark.storm),
    ],
)
def test_a_process_that_a_rank_starts_is_refused_and_the_job_goes_on(
    launcher: str, who: int, starts: list[str]
) -> None:
    ended = run_job(2, launcher, work, who, starts)
    assert [(end.code, end.output) for end in ended] == [(0, "well\n")] * 2, ended


@pytest.mark.storm
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_processes_that_all_ranks_start_are_refused(launcher: str) -> None:
    ended = run_job(3, launcher, work, None, ["a program"])
    assert [(end.code, end.output) for end in ended] == [(0, "well\n")] * 3, ended


def work_alone() -> None:
    with ddpkit.distributed(timeout=LONG):
        assert "alone 1.0" in (said := start_program()), said
        assert (said := start_child("spawn")) == "joined 1", said
        assert ddpkit.all_reduce(1.0) == 1.0
    print("well")


@pytest.mark.storm
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_process_that_a_job_of_one_rank_starts_is_another_job_of_one_rank(launcher: str) -> None:
    (ended,) = run_job(1, launcher, work_alone)
    assert (ended.code, ended.output) == (0, "well\n"), ended


def evaluate_afterwards(folder: str) -> None:
    with ddpkit.distributed(timeout=LONG) as context:
        ddpkit.barrier()
    Path(folder, f"left-{context.rank}").touch()
    while len(os.listdir(folder)) < 2:
        time.sleep(0.01)
    print(start_program().strip())


@pytest.mark.storm
def test_programs_that_ranks_start_after_their_job_has_ended_are_a_job_of_their_own(tmp_path: Path) -> None:
    ended = run_job(2, "torchrun", evaluate_afterwards, str(tmp_path))
    assert [end.output for end in ended] == ["joined 2.0\n"] * 2, ended


def leave_the_error_file(path: str) -> None:
    os.environ["TORCHELASTIC_ERROR_FILE"] = path
    with ddpkit.distributed(timeout=LONG) as context:
        if context.rank == 1:
            assert REFUSED in start_program()
        ddpkit.barrier()


def test_the_refusal_is_not_the_error_of_the_rank(tmp_path: Path) -> None:
    ended = run_job(2, "torchrun", leave_the_error_file, str(tmp_path / "error.json"))
    assert [end.code for end in ended] == [0, 0], ended
    assert not (tmp_path / "error.json").exists()


class Cycle:
    """Garbage that only the collector finds, and that holds the group."""

    def __init__(self) -> None:
        self.itself = self
        self.group = dist.group.WORLD


def leave_garbage_and_fork(torch_destroys: bool) -> int:
    gc.collect()
    gc.disable()
    try:
        if torch_destroys:
            dist.init_process_group("gloo")
            ddpkit.barrier()  # adopts it
        else:
            ddpkit.setup()
        Cycle()
        if torch_destroys:
            dist.destroy_process_group()
        ddpkit.teardown()
        if child := os.fork():
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        signal.alarm(60)
        gc.collect()
        os._exit(0)
    finally:
        gc.enable()


@pytest.mark.parametrize("torch_destroys", [False, True])
@pytest.mark.parametrize("nprocs", [1, 2])
def test_a_forked_child_does_not_collect_a_group_of_its_parent(nprocs: int, torch_destroys: bool) -> None:
    codes = testing.on_ranks(leave_garbage_and_fork, nprocs, torch_destroys, join=False, fresh=True)
    assert codes == [0] * nprocs
