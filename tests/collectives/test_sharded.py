"""Sharded tensors are recognised by torch's own classes, which only the ranks import: it takes a second."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from conftest import on_ranks
from torch.distributed.device_mesh import init_device_mesh

import ddpkit
from ddpkit import MismatchError, get_rank, get_world_size
from ddpkit.collectives.differences import explain_sharded
from ddpkit.torch_internals import is_sharded


def recognise() -> tuple[bool, bool, bool, str]:
    from torch.distributed.tensor import distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    model = fsdp2()
    replicated = distribute_tensor(torch.ones(4), mesh)
    plain = torch.nn.Linear(4, 4)
    words = explain_sharded("check_replicas()", model.named_parameters())
    return is_sharded(model.weight), is_sharded(replicated), is_sharded(plain.weight), words


def test_what_fully_shard_and_a_mesh_make_is_sharded_and_a_parameter_is_not() -> None:
    for sharded, replicated, plain, words in on_ranks(recognise, 2):
        assert (sharded, replicated, plain) == (True, True, False)
        assert "check_replicas() does not handle sharded tensors" in words
        assert "but these are: weight, bias. Each" in words


def test_values_that_are_no_tensors_are_not_sharded() -> None:
    assert not is_sharded({"a": 1})
    assert explain_sharded("save()", [("a", torch.ones(2)), ("b", None)]) == ""


def fsdp2() -> torch.nn.Module:
    from torch.distributed.fsdp import fully_shard

    return fully_shard(torch.nn.Linear(4, 4), mesh=init_device_mesh("cpu", (get_world_size(),)))


def fsdp1(**options: Any) -> torch.nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(torch.nn.Linear(4, 4), device_id=torch.device("cpu"), **options)


def fsdp1_with_own_names() -> torch.nn.Module:
    return fsdp1(use_orig_params=True)


def tensor_parallel() -> torch.nn.Module:
    from torch.distributed.tensor import parallel

    return parallel.parallelize_module(
        torch.nn.Linear(4, 4), init_device_mesh("cpu", (get_world_size(),)), parallel.ColwiseParallel()
    )


MAKERS = [fsdp2, fsdp1, fsdp1_with_own_names, tensor_parallel]


def enter(block: AbstractContextManager[Any]) -> None:
    with block:
        pass


CALLS: dict[str, Callable[[torch.nn.Module], Any]] = {
    "wrap_model": ddpkit.wrap_model,
    "sync_buffers": ddpkit.sync_buffers,
    "average_gradients": ddpkit.average_gradients,
    "averaging": lambda model: enter(ddpkit.averaging(model)),
    "accumulate": lambda model: enter(ddpkit.accumulate(model, 0, 2)),
    "global_mean of a module": lambda model: ddpkit.global_mean(model, 1),
    "global_mean": lambda model: ddpkit.global_mean(next(model.parameters()), 1),
}


trains_on_cpu = pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"), reason="fully_shard of this torch cannot train on CPUs"
)
TAKEN = ("accumulate", "global_mean of a module")  # by these calls, where the parameters are DTensors


def refuse(kinds: list[Callable[[], torch.nn.Module]], alone: bool) -> dict[tuple[str, str], str]:
    """The error of every call with every kind of model; `alone`, only rank 1 has one."""
    warnings.simplefilter("ignore")  # FSDP1 has several to give
    found = {}
    for make in kinds:
        sharded = make()
        model = torch.nn.Linear(4, 4) if alone and get_rank() != 1 else sharded
        for name, call in CALLS.items():
            if name in TAKEN and make in (fsdp2, tensor_parallel):
                continue
            with pytest.raises((TypeError, MismatchError)) as caught:
                call(model)
            found[make.__name__, name] = f"{type(caught.value).__name__}: {caught.value}"
        assert ddpkit.all_reduce(1) == get_world_size()  # the ranks are in step
    return found


def test_whatever_meets_a_sharded_model_refuses_it_in_our_words_on_every_rank() -> None:
    for found in on_ranks(refuse, 2, MAKERS, False):
        assert len(found) == len(MAKERS) * len(CALLS) - 2 * len(TAKEN)
        for (kind, call), text in found.items():
            assert text.startswith("TypeError: "), (kind, call, text)
            assert f"{call.split()[0]}() does not handle sharded tensors" in text, (kind, call, text)


def train(kind: str, micro_batches: int) -> list[list[float]]:
    """Train for three steps on uneven shares of seven samples, accumulating; return the weights."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model: torch.nn.Module = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).double()
    if kind == "fully_shard":
        fully_shard(model[0])
        fully_shard(model)
    else:
        model = ddpkit.wrap_model(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    shares = torch.arange(7.0, dtype=torch.float64)[get_rank() :: get_world_size(), None].tensor_split(micro_batches)
    for _ in range(3):
        for number, share in enumerate(shares):
            with ddpkit.accumulate(model, number, micro_batches) as complete:
                model(share).square().sum().backward()
            if not complete and kind == "fully_shard":
                assert all(parameter.grad is None for parameter in model.parameters())  # still of the whole model
        ddpkit.global_mean(model, sum(map(len, shares)))
        optimizer.step()
        optimizer.zero_grad()
    state = ddpkit.clean_state_dict(model.state_dict())
    whole = {name: value.full_tensor() if is_sharded(value) else value for name, value in state.items()}
    assert list(whole) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    return [value.flatten().tolist() for value in whole.values()]


@trains_on_cpu
@pytest.mark.parametrize("world_size", [2, 3])
def test_fully_shard_accumulates_and_averages_as_one_process_does(world_size: int) -> None:
    (expected,) = on_ranks(train, 1, "ddp", 1)
    for micro_batches in (1, 3):
        for found in on_ranks(train, world_size, "fully_shard", micro_batches):
            for weights, others in zip(found, expected, strict=True):
                assert weights == pytest.approx(others, rel=1e-12)


def average_dtensors() -> list[Any]:
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    rank, mesh = get_rank(), init_device_mesh("cpu", (get_world_size(),))
    made = {kind: DTensor.from_local(torch.full((2,), rank + 1.0), mesh, [kind()]) for kind in (Partial, Replicate)}
    found = ddpkit.all_reduce_mean({"terms": made[Partial], "same": made[Replicate], "plain": float(rank)})
    parts = DTensor.from_local(torch.ones(2), mesh, [Shard(0)])
    with pytest.raises(TypeError, match="found a sharded tensor .* at value"):
        ddpkit.all_reduce_mean(parts)
    return [type(found["terms"]) is torch.Tensor, found["terms"].tolist(), found["same"].tolist(), found["plain"]]


def test_dtensors_of_which_no_rank_lacks_a_part_are_averaged() -> None:
    for found in on_ranks(average_dtensors, 2):
        assert found == [True, [3.0, 3.0], [1.5, 1.5], 0.5]


def compare_replicas() -> dict[str, str]:
    """Compare models over a mesh of two replicas of two shards, after some ranks alone have changed something."""
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model = fully_shard(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)), mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    found = {"equal": why(ddpkit.check_replicas, model, optimizer)}
    local = model[1].weight.to_local().detach()
    before = local.clone()
    if get_rank() == 2:
        local += 1
    found["a part of one replica"] = why(ddpkit.check_replicas, model)
    local.copy_(before)
    if get_rank() in (1, 3):  # the same part in both
        local += 1
    found["a part of all replicas"] = why(ddpkit.check_replicas, model)
    if get_rank() >= 2:
        optimizer.state[model[0].bias]["exp_avg"].to_local().zero_()
    found["a state"] = why(ddpkit.check_replicas, model, optimizer)
    model[0].bias.requires_grad_(get_rank() != 3)
    found["frozen"] = why(ddpkit.check_replicas, model)
    plain = torch.nn.Linear(4, 4) if get_rank() == 1 else model[0]
    found["plain on one"] = why(ddpkit.check_replicas, plain)
    return found


def why(call: Callable[..., Any], *args: Any) -> str:
    try:
        call(*args)
    except ddpkit.DdpkitError as error:
        return f"{type(error).__name__}: {error}"
    return ""


@trains_on_cpu
def test_the_replicas_of_sharded_models_are_compared_part_by_part() -> None:
    results = on_ranks(compare_replicas, 4)
    for rank, found in enumerate(results):
        assert found["equal"] == "" and found["a part of all replicas"] == ""
        pair = f"ranks {rank % 2}, {rank % 2 + 2}".split()[1:]
        part = found["a part of one replica"]
        if rank % 2:
            assert part == ""
        else:
            assert part.startswith("ReplicaMismatchError: 1 of 4 entries differ") and "parameter 1.weight: " in part
            assert all(f"on rank {number.rstrip(',')}" in part for number in pair)
        assert "optimizer state exp_avg of 0.bias: float32[2] #" in found["a state"]
        assert "parameter 0.bias: float32[4] DTensor, R, S(0) on ranks 0, 1, 2; " in found["frozen"]
        assert "float32[4] DTensor, R, S(0), frozen on rank 3" in found["frozen"]
        assert "parameter weight: float32[4, 4] DTensor" in found["plain on one"]


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_sharded_model_on_one_rank_alone_is_an_error_on_all(world_size: int) -> None:
    for rank, found in enumerate(on_ranks(refuse, world_size, [fsdp2], True)):
        for (_, call), text in found.items():
            if rank == 1:
                assert text.startswith("TypeError: "), (call, text)
            else:
                assert text.startswith("MismatchError: ") and "rank 1: TypeError" in text, (call, text)


def hand_out() -> str:
    model = fsdp2()
    try:
        ddpkit.run_on_main(lambda: model.weight)
    except (TypeError, ddpkit.PeerError) as error:
        return str(error)
    return "went through"


def test_run_on_main_hands_out_no_shard() -> None:
    for words in on_ranks(hand_out, 2):
        assert "run_on_main() does not handle sharded tensors" in words
