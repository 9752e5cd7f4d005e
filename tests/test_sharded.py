"""Sharded tensors are recognised by torch's own classes."""

from __future__ import annotations

import torch
from conftest import on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

from ddpkit.sharded import explain_sharded, is_sharded


def recognise() -> tuple[bool, bool, bool, str]:
    mesh = init_device_mesh("cpu", (2,))
    model = fully_shard(torch.nn.Linear(4, 4), mesh=mesh)
    replicated = distribute_tensor(torch.ones(4), mesh)
    plain = torch.nn.Linear(4, 4)
    words = explain_sharded("check_replicas()", model.named_parameters())
    return is_sharded(model.weight), is_sharded(replicated), is_sharded(plain.weight), words


def test_what_fully_shard_and_a_mesh_make_is_sharded_and_a_parameter_is_not() -> None:
    for sharded, replicated, plain, words in on_ranks(recognise, 2):
        assert (sharded, replicated, plain) == (True, True, False)
        assert "check_replicas() does not handle sharded tensors" in words
        assert "weight, bias is one" in words


def test_values_that_are_no_tensors_are_not_sharded() -> None:
    assert not is_sharded({"a": 1})
    assert explain_sharded("save()", [("a", torch.ones(2)), ("b", None)]) == ""
