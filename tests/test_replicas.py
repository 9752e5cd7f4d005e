"""check_replicas: everything that can drift, damaged on one rank of three, must be named on all."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from conftest import on_ranks
from torch import nn

from ddpkit import ReplicaMismatch, get_rank
from ddpkit.replicas import check_replicas
from ddpkit.wrapping import wrap_model

Parts = tuple[nn.Module, torch.optim.Optimizer]


def _parts() -> Parts:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.Linear(64, 1))
    net.register_buffer("scale", torch.tensor(float("nan")))
    net.register_buffer("flags", torch.tensor([True, False]))
    net.register_buffer("sixteen", torch.ones(3, dtype=torch.bfloat16))
    net.register_buffer("empty", torch.zeros(0, 3))
    optimizer = torch.optim.Adam([{"params": net[0].parameters()}, {"params": net[2].parameters(), "lr": 0.1}])
    net(torch.randn(2, 8)).square().sum().backward()
    optimizer.step()
    return net, optimizer


@torch.no_grad()
def _ulp(net: nn.Module, _: torch.optim.Optimizer) -> None:
    net[0].weight[3, 5] = torch.nextafter(net[0].weight[3, 5], torch.tensor(torch.inf))


@torch.no_grad()
def _permuted(net: nn.Module, _: torch.optim.Optimizer) -> None:
    net[0].bias.copy_(net[0].bias.flip(0))


@torch.no_grad()
def _twos(net: nn.Module, _: torch.optim.Optimizer) -> None:
    net[2].weight.fill_(1.0 + (get_rank() == 1))


def _adam(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state[net[0].bias]["exp_avg"] *= 1.5


def _step(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state[net[2].bias]["step"] += 1


def _no_state(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    del optimizer.state[net[2].bias]


def _lr(_: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[1]["lr"] = 0.2


def _betas(_: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["betas"] = (0.9, 0.98)


def _buffer(net: nn.Module, _: torch.optim.Optimizer) -> None:
    net[1].running_mean[0] += 1


def _minus_nan(net: nn.Module, _: torch.optim.Optimizer) -> None:
    net.scale.neg_()


def _flag(net: nn.Module, _: torch.optim.Optimizer) -> None:
    net.flags[1] = True


def _dtype(net: nn.Module, _: torch.optim.Optimizer) -> None:
    net.sixteen = net.sixteen.half()


def _shape(net: nn.Module, _: torch.optim.Optimizer) -> None:
    net.empty = torch.zeros(3, 0)


def _missing(net: nn.Module, _: torch.optim.Optimizer) -> None:
    del net.sixteen


DAMAGE: dict[Callable[[nn.Module, torch.optim.Optimizer], None], str] = {
    _ulp: "parameter 0.weight: float32[64, 8] #",
    _permuted: "parameter 0.bias: float32[64] #",
    _twos: "parameter 2.weight: float32[1, 64] #",
    _adam: "optimizer state exp_avg of 0.bias: float32[64] #",
    _step: "optimizer state step of 2.bias: float32[] #",
    _no_state: "optimizer state exp_avg of 2.bias: float32[1] #",
    _lr: "optimizer group 1 lr: 0.1 on ranks 0, 2; 0.2 on rank 1",
    _betas: "optimizer group 0 betas: [0.9, 0.999] on ranks 0, 2; [0.9, 0.98] on rank 1",
    _buffer: "buffer 1.running_mean: float32[64] #",
    _minus_nan: "buffer scale: float32[] #",
    _flag: "buffer flags: bool[2] #",
    _dtype: "buffer sixteen: bfloat16[3] #",
    _shape: "buffer empty: float32[0, 3] #",
    _missing: "buffer sixteen: bfloat16[3] #",
}


def _damaged() -> dict[str, str | None]:
    messages: dict[str, str | None] = {}
    for damage in DAMAGE:
        net, optimizer = _parts()
        check_replicas(net, optimizer)  # equal so far, NaN included
        if get_rank() == 1 or damage is _twos:
            damage(net, optimizer)
        try:
            check_replicas(net, optimizer)
            messages[damage.__name__] = None
        except ReplicaMismatch as error:
            messages[damage.__name__] = str(error)
    return messages


def test_every_difference_is_named_on_every_rank():
    results = on_ranks(_damaged, 3)
    for damage, line in DAMAGE.items():
        message, *others = (result[damage.__name__] for result in results)
        assert message is not None, f"{damage.__name__} was not seen"
        assert others == [message, message]
        entries = message.splitlines()[1:]
        (entry,) = (one for one in entries if one.startswith(f"  {line}"))
        assert "on ranks 0, 2; " in entry and entry.endswith("on rank 1")
        assert len(entries) == (3 if damage is _no_state else 1), message
        assert message.startswith(f"{len(entries)} of ")
        assert ("absent on rank 1" in message) == (damage in (_no_state, _missing))


def _wrapped() -> list[str]:
    model = wrap_model(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    check_replicas(model)  # as rank 0 made it
    model(torch.full((4, 2), get_rank() + 1.0))  # now BatchNorm holds the statistics of this rank's batch
    errors = []
    for _ in range(2):
        with pytest.raises(ReplicaMismatch) as caught:
            check_replicas(model)
        errors.append(str(caught.value))
        model.eval()(torch.ones(4, 2))  # this forward sends rank 0's statistics to all
        with torch.no_grad():
            model.module[0].weight += get_rank()
    return errors


def _many() -> str:
    net = nn.ParameterList(torch.full((1,), float(get_rank())) for _ in range(30))
    with pytest.raises(ReplicaMismatch) as caught:
        check_replicas(net)
    return str(caught.value)


def _wrapped_and_many() -> tuple[list[str], str]:
    return _wrapped(), _many()


def test_names_are_the_models_own_and_statistics_differ_until_the_next_forward():
    for (first, second), many in on_ranks(_wrapped_and_many, 2):
        assert [line.split(":")[0] for line in first.splitlines()[1:]] == ["  buffer 1.running_mean"]
        assert [line.split(":")[0] for line in second.splitlines()[1:]] == ["  parameter 0.weight"]
        assert many.startswith("30 of 30 entries")
        assert many.endswith("  and 10 more")  # a long list is cut


def test_one_process_has_nothing_to_compare():
    check_replicas(*_parts())
