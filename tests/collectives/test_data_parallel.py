"""Ranks that share a model: samples, gradients, replicas and seeds are those of the data-parallel ones."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import on_ranks
from test_groups import raised
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import ddpkit
from ddpkit.job import current_job

SAMPLES = 7


def place() -> tuple[int, int]:
    return ddpkit.get_data_parallel_rank(), ddpkit.get_data_parallel_world_size()


def make_model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(1, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))


def train(part: int, wrapped: bool) -> dict[str, Any]:
    """Train a part of a model on uneven batches for two epochs; return what a rank has seen and has come to."""
    model = make_model(seed=part)
    stepped = ddpkit.wrap_model(model, broadcast_buffers=False) if wrapped else model
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = [(torch.tensor([float(i)]), i) for i in range(SAMPLES)]
    loader = ddpkit.make_loader(data, 2, seed=3)
    seen = []
    for epoch in loader.epochs(2):
        for x, index in loader:
            seen.append((epoch, index.tolist()))
            model.eval()  # the samples' own statistics would depend on the batch
            loss_sum = stepped(x / SAMPLES).square().sum()
            ddpkit.global_mean(loss_sum, len(x)).backward()
            if not wrapped:
                ddpkit.average_gradients(model)
            optimizer.step()
            optimizer.zero_grad()
    ddpkit.check_replicas(model, optimizer)
    model[1].running_mean.fill_(float(place()[0]))
    drifted = raised(ddpkit.check_replicas, model)
    ddpkit.sync_buffers(model)
    return {
        "seen": seen,
        "weights": [parameter.tolist() for parameter in model.parameters()],
        "drifted": drifted,
        "mean": model[1].running_mean.tolist(),
    }


def two_parts_of_a_model(wrapped: bool) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    ddpkit.set_data_parallel(mesh["dp"])
    found = {"place": place(), "seed": ddpkit.seed_everything(1, per_rank=True)}
    found |= train(mesh["tp"].get_local_rank(), wrapped)
    loader = ddpkit.make_loader(range(SAMPLES), 2, train=False)
    results = [i * i for batch in loader for i in batch.tolist()]
    found["exact"] = ddpkit.gather_exact(results, list(loader.sampler), SAMPLES)
    kept = raised(lambda: ddpkit.set_data_parallel(None) or list(loader))
    found["kept"], found["all"] = kept, place()
    return found


def one_part_of_a_model(part: int, wrapped: bool) -> dict[str, Any]:
    return {"seed": ddpkit.seed_everything(1, per_rank=True), **train(part, wrapped)}


@pytest.mark.parametrize("wrapped", [True, False])
def test_two_by_two_ranks_do_what_two_jobs_of_two_would(wrapped: bool) -> None:
    together = on_ranks(two_parts_of_a_model, 4, wrapped)
    assert [found["place"] for found in together] == [(0, 2), (0, 2), (1, 2), (1, 2)]
    for part in range(2):
        apart = on_ranks(one_part_of_a_model, 2, part, wrapped)
        for expected, found in zip(apart, together[part::2], strict=True):
            for name in ("seen", "seed", "weights", "mean"):
                assert found[name] == expected[name], name
            assert f"on rank {part}; " in found["drifted"] and f"on rank {part + 2}" in found["drifted"]
            assert found["mean"] == [0.5] * 3
    for found in together:
        assert found["exact"] == [i * i for i in range(SAMPLES)]
        assert "was made for rank" in found["kept"] and found["all"][1] == 4


def choose_badly() -> list[str]:
    rank = ddpkit.get_rank()
    pair, other = dist.new_group([0, 1]), dist.new_group([1, 2])
    named = {
        "outside": pair,
        "different": [pair, other, other][rank],
        "sizes": pair if rank < 2 else dist.new_group([2], use_local_synchronization=True),
        "type": "dp" if rank == 1 else None,
    }
    found = [raised(ddpkit.set_data_parallel, group) for group in named.values()]
    assert place() == (rank, 3)
    return found


def test_groups_that_do_not_fit_together_are_refused_on_every_rank() -> None:
    first, second, third = on_ranks(choose_badly, 3)
    assert third[0].startswith("ValueError: Rank 2 is not in group=") and "rank 2: ValueError" in first[0]
    for found in (first, second, third):
        assert "needs groups of one size" in found[1] and "needs groups of one size" in found[2]
        assert re.search(r"rank 0 passed ranks 0, 1\n +rank 1 passed ranks 1, 2\n +rank 2 passed ranks 1, 2", found[1])
        assert found[2].endswith("rank 2 passed rank 2")
    assert second[3].startswith("TypeError: group must be a process group") and "rank 1: TypeError" in first[3]


def of_a_mesh_of_three_dimensions() -> list[Any]:
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("replicate", "shard", "tp"))
    ddpkit.set_data_parallel(mesh["replicate", "shard"])
    found = [place(), current_job.data_parallel().ranks]
    ddpkit.set_data_parallel(mesh)
    return [*found, place()]


def test_several_dimensions_of_a_mesh_are_data_parallel_together() -> None:
    for rank, found in enumerate(on_ranks(of_a_mesh_of_three_dimensions, 4)):
        members = (rank % 2, rank % 2 + 2)
        assert found == [(members.index(rank), 2), members, (rank, 4)]


def test_one_process_is_the_only_data_parallel_rank() -> None:
    ddpkit.set_data_parallel(None)
    assert place() == (0, 1)


def refused() -> list[str]:
    return [raised(ddpkit.set_data_parallel, group) for group in (3, "dp")]


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_is_no_group_is_refused_on_any_number_of_ranks(world_size):
    for found in on_ranks(refused, world_size):
        assert "TypeError" in found[0] and "got int" in found[0] and "got str" in found[1]
