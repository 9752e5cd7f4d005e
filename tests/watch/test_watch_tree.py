"""The tree of the watch: its shape, and news that travel through ranks which only pass them on."""

from __future__ import annotations

import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from processes import free_port, platform_env, run
from test_watch import SOON, freed_after, start

import ddpkit
from ddpkit.job import current_job
from ddpkit.watch import messages as monitor_tree
from ddpkit.watch.messages import children_of, is_below, parent_of


@given(st.integers(1, 20_000))
def test_each_rank_has_one_way_to_rank_0_and_few_connections(world_size: int) -> None:
    children = [rank for top in range(world_size) for rank in children_of(top, world_size)]
    assert children == list(range(1, world_size))
    for rank in {world_size // 2, world_size - 1} - {0}:
        assert rank in children_of(parent_of(rank), world_size)
        assert len(children_of(rank, world_size)) + 1 <= 64
    assert len(children_of(0, world_size)) <= 64


@given(st.integers(1, 10**6))
def test_few_steps_lead_from_any_rank_to_rank_0(rank: int) -> None:
    steps = 0
    top = rank
    while top:
        assert is_below(rank, top) and not is_below(top, rank + 1)
        top = parent_of(top)
        steps += 1
    assert steps == next(n for n in range(1, 5) if rank < sum(63**k for k in range(n + 1)))


def test_a_rank_is_not_below_its_sibling() -> None:
    assert is_below(64, 1) and not is_below(64, 2) and not is_below(2, 1)


def start_in_chain(fault: str, place: str) -> None:
    """Let each rank be connected to its neighbours only, so that news of the last pass through all."""
    monitor_tree.CHILDREN = 1
    start(fault, place)


def check_that_all_name(faulty: int, fault: str, place: str) -> None:
    port = free_port()
    envs = [platform_env(rank, 4, port, FAULTY=f"{faulty}") for rank in range(4)]
    ended = run(start_in_chain, envs, fault, place)
    assert freed_after(ended) < SOON
    for rank, end in enumerate(ended):
        if rank == faulty:
            assert end.code == {"raise": 1, "kill": -signal.SIGKILL, "leave": 0}[fault]
            continue
        assert end.code == 1, end
        assert f"rank {faulty} (" in end.output, end.output


def test_a_failure_passes_through_ranks_that_have_no_part_in_it() -> None:
    check_that_all_name(3, "raise", "compute")


@pytest.mark.storm
@pytest.mark.parametrize("faulty", range(4))
@pytest.mark.parametrize(
    ("fault", "place"),
    [("raise", "compute"), ("raise", "barrier"), ("kill", "compute"), ("kill", "all_reduce"), ("leave", "barrier")],
)
def test_any_failed_rank_of_a_chain_is_named_on_every_other(fault: str, place: str, faulty: int) -> None:
    check_that_all_name(faulty, fault, place)


def leave_one_by_one(order: list[int]) -> None:
    monitor_tree.CHILDREN = 1
    rank = ddpkit.setup().rank
    store = current_job.current_session().store
    turn = order.index(rank)
    if turn:
        store.wait([f"turn/{turn}"])
    ddpkit.teardown()
    store.set(f"turn/{turn + 1}", "")
    print(f"rank {rank} left")


@pytest.mark.parametrize("order", [[1, 2, 0], [2, 1, 0]])
def test_ranks_of_a_chain_leave_in_any_order_without_a_word(order: list[int]) -> None:
    port = free_port()
    ended = run(leave_one_by_one, [platform_env(rank, 3, port) for rank in range(3)], order)
    for rank, end in enumerate(ended):
        assert end.code == 0 and end.output.strip() == f"rank {rank} left", end.output
