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
from ddpkit.collectives.sharded import explain_sharded
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
    "check_replicas": ddpkit.check_replicas,
    "sync_buffers": ddpkit.sync_buffers,
    "average_gradients": ddpkit.average_gradients,
    "averaging": lambda model: enter(ddpkit.averaging(model)),
    "accumulate": lambda model: enter(ddpkit.accumulate(model, 0, 2)),
    "global_mean of a module": lambda model: ddpkit.global_mean(model, 1),
    "global_mean": lambda model: ddpkit.global_mean(next(model.parameters()), 1),
}


def refuse(kinds: list[Callable[[], torch.nn.Module]], alone: bool) -> dict[tuple[str, str], str]:
    """The error of every call with every kind of model; `alone`, only rank 1 has one."""
    warnings.simplefilter("ignore")  # FSDP1 has several to give
    found = {}
    for make in kinds:
        sharded = make()
        model = torch.nn.Linear(4, 4) if alone and get_rank() != 1 else sharded
        for name, call in CALLS.items():
            if alone and name == "accumulate":
                continue  # it does not communicate
            with pytest.raises((TypeError, MismatchError)) as caught:
                call(model)
            found[make.__name__, name] = f"{type(caught.value).__name__}: {caught.value}"
        assert ddpkit.all_reduce(1) == get_world_size()  # the ranks are in step
    return found


def test_whatever_meets_a_sharded_model_refuses_it_in_our_words_on_every_rank() -> None:
    for found in on_ranks(refuse, 2, MAKERS, False):
        assert len(found) == len(MAKERS) * len(CALLS)
        for (kind, call), text in found.items():
            assert text.startswith("TypeError: "), (kind, call, text)
            assert f"{call.split()[0]}() does not handle sharded tensors" in text, (kind, call, text)


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
