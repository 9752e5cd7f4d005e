from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import ddpkit
from ddpkit import PeerError, spawn


def describe(word: str) -> tuple[str, int, int, str]:
    with ddpkit.distributed() as context:
        return word, context.rank, context.world_size, context.launcher


@pytest.mark.parametrize("nprocs", [1, 2, 3])
def test_results_come_back_by_rank(nprocs: int) -> None:
    assert spawn(describe, nprocs, "hi") == [("hi", rank, nprocs, "spawn") for rank in range(nprocs)]


def raise_on(rank: int, setup: bool) -> None:
    if setup:
        ddpkit.setup()
        ddpkit.barrier()
    if int(os.environ["RANK"]) == rank:
        raise ZeroDivisionError("oh")
    time.sleep(20)


@pytest.mark.parametrize(("rank", "setup"), [(0, True), (2, True)])
def test_the_workers_own_exception_is_raised_with_its_rank(rank: int, setup: bool) -> None:
    start = time.monotonic()
    with pytest.raises(ZeroDivisionError, match="oh") as caught:
        spawn(raise_on, 3, rank, setup)
    assert time.monotonic() - start < 10.0
    cause = caught.value.__cause__
    assert isinstance(cause, PeerError) and cause.rank == rank and "raise_on" in cause.traceback


class Stubborn(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__("cannot be unpickled")


def raise_stubborn() -> None:
    raise Stubborn(1, 2)


def test_an_exception_that_cannot_travel_is_described() -> None:
    with pytest.raises(PeerError, match=r"rank 0 .*Stubborn: cannot be unpickled"):
        spawn(raise_stubborn, 1)


def hang_on_one() -> int:
    if os.environ["RANK"] == "1":
        wait_for_godot()
    return os.getpid()


def wait_for_godot() -> None:
    threading.Event().wait(60)


def time_out(as_expected: Callable[[str], bool], fn: Callable[..., Any], nprocs: int, *args: Any) -> None:
    """Runs out of time, and again out of more, until the ranks have come far enough; a loaded machine is slow."""
    for seconds in (2, 8, 32):
        with pytest.raises(TimeoutError) as caught:
            spawn(fn, nprocs, *args, timeout=timedelta(seconds=seconds))
        if as_expected(str(caught.value)):
            return
    pytest.fail(str(caught.value))


def only_rank_1_hangs(text: str) -> bool:
    stuck = re.search(r"not finished:\nrank 1:(.|\n)*wait_for_godot", text)
    return bool(stuck) and "rank 0" not in text and "rank 2" not in text


def test_a_hanging_rank_is_named_with_its_stack() -> None:
    time_out(only_rank_1_hangs, hang_on_one, 3)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_rank_is_named_with_its_signal() -> None:
    with pytest.raises(PeerError, match=r"rank 0 .*lost: killed by SIGKILL"):
        spawn(die, 1)


def leave() -> None:
    raise SystemExit("bad arguments")


def test_a_worker_that_exits_does_not_end_the_caller() -> None:
    with pytest.raises(PeerError, match=r"rank 0 .*SystemExit: bad arguments"):
        spawn(leave, 1)


SAY = """
import ddpkit
def say():
    print("a line")
if __name__ == "__main__":
    for _ in range(5):
        ddpkit.spawn(say, 2)
"""


def test_what_workers_print_arrives(tmp_path: Path) -> None:
    (tmp_path / "say.py").write_text(SAY)
    env = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"} | {
        "PYTHONPATH": str(Path(__file__).parents[1])
    }
    done = subprocess.run(
        [sys.executable, str(tmp_path / "say.py")], env=env, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "a line\n" * 10, done.stderr


def fill(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.fill_(int(os.environ["RANK"]) + 1)


def test_tensors_are_copied_both_ways() -> None:
    mine = torch.zeros(3)
    results = spawn(fill, 2, mine)
    assert mine.tolist() == [0, 0, 0]
    assert [result.tolist() for result in results] == [[1, 1, 1], [2, 2, 2]]


def world(number: int) -> tuple[int, list[Any]]:
    with ddpkit.distributed():
        return number, ddpkit.all_gather_object((number, ddpkit.get_rank()))


def test_many_launches_in_parallel_do_not_meet() -> None:
    results: list[Any] = [None] * 20

    def work(number: int) -> None:
        results[number] = spawn(world, 2, number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [[(number, [(number, 0), (number, 1)])] * 2 for number in range(20)]


def report_pid(folder: str) -> None:
    open(f"{folder}/{os.getpid()}", "w").close()
    hang_on_one()


def test_no_process_is_left_behind(tmp_path: Any) -> None:
    time_out(lambda _: len(os.listdir(tmp_path)) >= 2, report_pid, 2, str(tmp_path))
    for pid in os.listdir(tmp_path):
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)


def test_bad_arguments_are_refused_before_anything_starts() -> None:
    with pytest.raises(ValueError, match="positive integer, got 0"):
        spawn(die, 0)
    with pytest.raises(TypeError, match="cannot send"):
        spawn(lambda: None, 2)
