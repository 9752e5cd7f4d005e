"""Collectives in threads: one thread calls them, a second one is an error on all ranks, and values never mix."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import on_ranks
from processes import free_port, platform_env, run

import ddpkit

REFUSED = " calls a collective, but thread '"


def in_thread(work: Any, name: str = "first") -> threading.Thread:
    thread = threading.Thread(target=work, name=name)
    thread.start()
    return thread


def average(values: list[float]) -> None:
    for i in range(30):
        values.append(ddpkit.all_reduce_mean(float(i)))


def wait_often() -> None:
    for _ in range(30):
        ddpkit.barrier("of a thread")


def average_in_two_threads(wait_for_first: bool) -> None:
    with ddpkit.distributed():
        values: list[float] = []
        if wait_for_first:
            ddpkit.barrier()
        thread = in_thread(lambda: average(values), "second")
        average(values)
        thread.join()
        print("ended well", values)


def wait_in_two_threads(_: bool) -> None:
    with ddpkit.distributed():
        ddpkit.barrier()
        thread = in_thread(wait_often, "second")
        wait_often()
        thread.join()
        ddpkit.barrier()
        print("ended well")


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    ("program", "wait_for_first"),
    [
        (average_in_two_threads, True),
        (average_in_two_threads, False),
        (wait_in_two_threads, True),
    ],
)
def test_a_second_thread_in_a_collective_is_an_error_on_all_ranks(
    program: Any, wait_for_first: bool, world_size: int
) -> None:
    port = free_port()
    for end in run(program, [platform_env(rank, world_size, port) for rank in range(world_size)], wait_for_first):
        assert end.code == 1, end
        assert REFUSED in end.output, end


def average_while_the_main_thread_leaves(_: bool) -> None:
    left = threading.Event()
    destroy = dist.destroy_process_group

    def destroy_slowly() -> None:
        time.sleep(1.0)
        destroy()

    def go_on() -> None:
        while not left.is_set():
            with contextlib.suppress(ddpkit.DdpkitError):
                ddpkit.all_reduce_mean(1.0)

    dist.destroy_process_group = destroy_slowly
    try:
        with ddpkit.distributed() as context:
            ddpkit.barrier()
            if context.rank == 0:  # the host of the store, which would wait for others there
                in_thread(go_on, "second")
    finally:
        left.set()


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_thread_that_goes_on_while_its_job_ends_does_not_join_it_again(world_size: int) -> None:
    port = free_port()
    envs = [platform_env(rank, world_size, port) for rank in range(world_size)]
    for end in run(average_while_the_main_thread_leaves, envs, False, timeout=60):
        assert end.code in (0, 1), end  # 1 where the thread was refused before the block's end


def work_in_one_thread_after_another() -> list[float]:
    with ddpkit.distributed():
        values: list[float] = []
        for name in ("first", "next"):
            in_thread(lambda: average(values), name).join()
        ddpkit.barrier()  # the main thread goes on
        return values + [ddpkit.all_reduce_mean(1.0)]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_threads_may_call_them_one_after_the_other(world_size: int) -> None:
    assert (
        ddpkit.spawn(work_in_one_thread_after_another, world_size)
        == [[*map(float, range(30)), *map(float, range(30)), 1.0]] * world_size
    )


class Deeper(torch.autograd.Function):
    """A backward within a backward, so many times; the engine runs those beyond 60 in threads of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, depth: int) -> torch.Tensor:
        ctx.depth = depth
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        if ctx.depth:
            with torch.enable_grad():
                inner = torch.ones(1, requires_grad=True)
                Deeper.apply(inner, ctx.depth - 1).backward()
                return grad * inner.grad, None
        return grad * ddpkit.all_reduce(float(threading.current_thread() is threading.main_thread()) + 1), None


def exchange_in_backward(depth: int) -> float:
    ddpkit.barrier()
    x = torch.ones(1, requires_grad=True)
    Deeper.apply(x, depth).backward()
    return float(x.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(("depth", "value"), [(0, 2.0), (100, 1.0)])
def test_a_backward_may_call_them_in_whatever_thread_it_runs(depth: int, value: float, world_size: int) -> None:
    assert on_ranks(exchange_in_backward, world_size, depth) == [value * world_size] * world_size


def run_backward_in_a_thread() -> None:
    with ddpkit.distributed():
        ddpkit.barrier()
        in_thread(lambda: exchange_in_backward(0), "second").join()
        ddpkit.barrier()


def test_a_backward_in_a_second_thread_is_refused() -> None:
    port = free_port()
    for end in run(run_backward_in_a_thread, [platform_env(rank, 2, port) for rank in range(2)]):
        assert end.code == 1 and REFUSED in end.output, end
