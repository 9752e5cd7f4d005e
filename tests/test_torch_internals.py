"""Torch's private parts: that they are still there, and that compiled code calls our functions as eager code does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from conftest import on_ranks, same
from torch import Tensor, nn

import ddpkit
from ddpkit import get_rank, get_world_size
from ddpkit.torch_internals import (
    forward_pre_hooks,
    has_no_memory,
    is_compiled,
    module_versions,
    set_module_versions,
    tensors_in,
    untraced,
)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))


def averaged(x: Tensor, net: nn.Module) -> list[Tensor]:
    net(x).sum().backward()
    ddpkit.average_gradients(net)
    return [p.grad for p in net.parameters()]


def averaged_meanwhile(x: Tensor, net: nn.Module) -> list[Tensor]:
    net(x).sum().backward()
    with ddpkit.averaging(net):
        y = x + 1
    return [y, *(p.grad for p in net.parameters())]


def synced(x: Tensor, net: nn.Module) -> list[Tensor]:
    net(x)
    ddpkit.sync_buffers(net)
    ddpkit.check_replicas(net)
    return list(net.buffers())


def counted(x: Tensor, net: nn.Module) -> Any:
    ddpkit.barrier()
    with ddpkit.together("count"):
        x = x + 1
    return [ddpkit.stop_together(get_rank() == 0), ddpkit.run_on_main(len, [1, 2]), x]


CALLS: dict[str, Callable[[Tensor, nn.Module], Any]] = {
    "all_reduce_mean": lambda x, net: ddpkit.all_reduce_mean({"x": x[:2] * 2, "n": len(x)})["x"] + 1,
    "all_reduce": lambda x, net: ddpkit.all_reduce(x[:2] * 2, "max"),
    "of arrays": lambda x, net: float(ddpkit.all_reduce_mean(np.float32(len(x)))),
    "all_gather": lambda x, net: ddpkit.all_gather(x * 2),
    "all_gather_object": lambda x, net: ddpkit.all_gather_object([x * 2, "text"]),
    "broadcast": lambda x, net: ddpkit.broadcast({"x": x * 2})["x"],
    "gather_exact": lambda x, net: ddpkit.gather_exact(x[:1] * 2, [get_rank()], get_world_size()),
    "global_mean": lambda x, net: ddpkit.global_mean(net(x).sum(), len(x)).detach(),
    "average_gradients": averaged,
    "averaging": averaged_meanwhile,
    "sync_buffers": synced,
    "waits": counted,
}


def compiled_and_eager() -> list[str]:
    different = []
    x = torch.arange(4.0 + 2 * get_rank()).reshape(-1, 2)
    for name, call in CALLS.items():
        torch._dynamo.reset()
        compiled = torch.compile(call, backend="eager")
        for step in range(3):
            eager = call(x + step, network())
            found = compiled(x + step, network())
            if not same([eager], [found]):
                different.append(name)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="it exchanges values with other ranks"):
        torch.compile(CALLS["all_reduce"], backend="eager", fullgraph=True)(x, network())
    return different


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
@pytest.mark.parametrize(
    "world", [pytest.param(1, marks=pytest.mark.storm), 2, pytest.param(3, marks=pytest.mark.storm)]
)
def test_compiled_code_gets_what_eager_code_gets(world: int) -> None:
    assert on_ranks(compiled_and_eager, world) == [[]] * world


def test_a_marked_function_is_the_function_itself() -> None:
    def function() -> int:
        return 1

    assert untraced(function) is function  # nothing around it that costs time


def test_torch_still_keeps_its_modules_hooks_versions_and_marks_where_we_look() -> None:
    net = nn.BatchNorm1d(2)
    assert is_compiled(torch.compile(net, backend="eager")) and not is_compiled(net)
    net.register_forward_pre_hook(print)
    assert list(forward_pre_hooks(net).values()) == [print]
    assert [len(tensor) for tensor in tensors_in({"a": [torch.ones(1)], "b": (1, torch.ones(2))})] == [1, 2]
    assert has_no_memory(torch._efficientzerotensor((2,))) and not has_no_memory(torch.zeros(2))


def test_torch_still_migrates_a_state_dict_by_the_versions_that_we_give_it() -> None:
    state = nn.BatchNorm1d(2).state_dict()
    assert module_versions(state) == {"": {"version": 2}}
    del state["num_batches_tracked"]
    with pytest.raises(RuntimeError, match="num_batches_tracked"):
        nn.BatchNorm1d(2).load_state_dict(state)
    set_module_versions(state, {"": {"version": 1}})  # which had none
    nn.BatchNorm1d(2).load_state_dict(state)
