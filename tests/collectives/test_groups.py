"""Calls in which only some ranks take part: those of a process group, or of one dimension of a mesh."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import on_ranks
from torch.distributed.device_mesh import init_device_mesh

import ddpkit

A_SECOND = timedelta(seconds=1)


def raised(call: Any, *args: Any, **kwargs: Any) -> str:
    """The name and text of the error that a call raises, "" if none."""
    try:
        call(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def meet_in_groups() -> list[Any]:
    """Ranks 0 and 2 meet again and again, once in vain, while rank 1 has no part in it."""
    rank = ddpkit.get_rank()
    pair = dist.new_group([2, 0])  # torch sorts them
    found = []
    if rank == 1:
        found += [raised(ddpkit.barrier, group=pair), raised(ddpkit.barrier, group=3)]
    else:
        for _ in range(3):
            ddpkit.barrier(group=pair)
        ddpkit.barrier("own", group=pair)
        ddpkit.barrier("good", group=pair)
        if rank == 0:
            found.append(raised(ddpkit.barrier, "in vain", A_SECOND, group=pair))
        else:
            time.sleep(1.5)
            found.append(raised(ddpkit.barrier, "in vain", A_SECOND, group=pair))
    ddpkit.barrier("good")
    ddpkit.barrier(group=dist.group.WORLD)
    ddpkit.barrier()
    return found


def test_a_barrier_of_some_ranks_waits_for_these_only() -> None:
    first, second, third = on_ranks(meet_in_groups, 3)
    assert second[0].startswith("ValueError: Rank 1 is not in group=")
    assert second[1] == "TypeError: group must be a process group, or a mesh of one dimension, got int."
    for text in (first[0], third[0]):
        assert "BarrierTimeoutError: barrier 'in vain' of ranks 0, 2: 1 of 2 ranks did not arrive within 1 s" in text
        assert "rank 1" not in text
    assert "This is rank 2, which arrived too late" in third[0]


def meet_in_a_mesh() -> list[Any]:
    rank = ddpkit.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    found = [raised(ddpkit.barrier, group=mesh)]
    if rank < 2:  # two ranks of "tp"
        ddpkit.barrier(group=mesh["tp"])
    ddpkit.barrier(group=mesh["dp"])
    if rank == 3:
        found.append(raised(ddpkit.barrier, timeout=A_SECOND, group=mesh["tp"]))
    ddpkit.barrier()
    return found


def test_one_dimension_of_a_mesh_meets() -> None:
    *_, last = on_ranks(meet_in_a_mesh, 4)
    assert last[0] == 'ValueError: The mesh has 2 dimensions; pass one, such as mesh["dp"].'
    assert "barrier of ranks 2, 3: 1 of 2 ranks did not arrive" in last[1]


def move_values_in_groups() -> dict[str, Any]:
    """Ranks 0 and 2 exchange values of all kinds, while rank 1 does so alone, in a group of one."""
    rank = ddpkit.get_rank()
    groups = [dist.new_group(ranks) for ranks in ([0, 2], [1])]
    group = groups[rank % 2]
    large = torch.full((3000,), float(rank), dtype=torch.float16)
    found: dict[str, Any] = {
        "mean": ddpkit.all_reduce_mean({"loss": float(rank), "large": large}, group=group),
        "weighted": ddpkit.all_reduce_mean(float(rank), weight=rank + 1, group=group),
        "unchecked": ddpkit.all_reduce(torch.ones(2), check=False, group=group).tolist(),
        "max": ddpkit.all_reduce(rank, "max", group=group),
        "huge": ddpkit.all_reduce([1e308, 1e308], "mean", group=group),
        "gathered": [part.tolist() for part in ddpkit.all_gather(torch.arange(rank), group=group)],
        "objects": ddpkit.all_gather_object({"rank": rank}, group=group),
        "first": ddpkit.broadcast([rank, torch.full((600,), rank)], group=group)[0],
        "exact": ddpkit.gather_exact([rank], [0 if rank < 2 else 1], 2 - rank % 2, group=group),
        "outside": raised(ddpkit.broadcast, 0, src=1 if rank != 1 else 0, group=group),
        "different": raised(ddpkit.all_reduce, float(rank) if rank else torch.ones(2), group=group),
        "bad": raised(ddpkit.all_reduce, "text" if rank == 2 else 1.0, group=group),
        "repeated": raised(ddpkit.gather_exact, [rank], [0], 1, group=group),
    }
    if rank != 1:
        found["last"] = ddpkit.broadcast(rank, src=2, group=group)
    found["all"] = ddpkit.all_reduce(1, group=dist.group.WORLD)
    found["unequal"] = found["mean"].pop("large").unique().tolist()
    return found


def test_values_move_in_a_group_as_in_the_job() -> None:
    first, alone, last = on_ranks(move_values_in_groups, 3)
    assert first["mean"] == last["mean"] == {"loss": 1.0} and alone["mean"] == {"loss": 1.0}
    assert first["unequal"] == last["unequal"] == [1.0]
    assert first["weighted"] == last["weighted"] == 1.5 and alone["weighted"] == 1.0
    assert (first["unchecked"], alone["unchecked"]) == ([2.0, 2.0], [1.0, 1.0])
    assert (first["max"], alone["max"]) == (2, 1) and first["huge"] == alone["huge"] == [1e308, 1e308]
    assert first["gathered"] == last["gathered"] == [[], [0, 1]] and alone["gathered"] == [[0]]
    assert first["objects"] == [{"rank": 0}, {"rank": 2}] and alone["objects"] == [{"rank": 1}]
    assert (first["first"], alone["first"], last["first"]) == (0, 1, 0) and first["last"] == last["last"] == 2
    assert first["exact"] == last["exact"] == [0, 2] and alone["exact"] == [1]
    assert first["outside"] == "ValueError: src must be a rank, one of 0, 2, got 1."
    for text in (first["different"], last["different"]):
        assert text.startswith("MismatchError") and "on rank 0" in text and "on rank 2" in text
    assert "rank 2: TypeError" in first["bad"] and alone["bad"] == "" and last["bad"].startswith("TypeError")
    assert "1 repeated: 0 on ranks 0, 2" in first["repeated"] == last["repeated"]
    assert first["all"] == alone["all"] == 3


def wait_while_an_outsider_fails() -> None:
    pair = dist.new_group([0, 2])
    ddpkit.barrier()
    if ddpkit.get_rank() == 1:
        raise ValueError("no such file")
    if ddpkit.get_rank() == 0:
        ddpkit.barrier(group=pair)
    time.sleep(60)


def test_ranks_that_wait_for_each_other_hear_of_one_that_is_not_in_their_group() -> None:
    with pytest.raises(ValueError, match="no such file"):
        on_ranks(wait_while_an_outsider_fails, 3)


def test_a_group_of_one_process_meets() -> None:
    ddpkit.barrier(group=None)
    with pytest.raises(TypeError, match="group must be a process group"):
        ddpkit.barrier(group="dp")  # type: ignore[arg-type]
