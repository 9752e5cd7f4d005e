"""The fit of saved states to optimizers and schedulers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import same
from runs import (
    compiled,
)
from torch import nn
from torch.nn.parallel import DataParallel

from ddpkit.checkpoint.checkpointer import Checkpointer
from ddpkit.errors import CheckpointError


def test_an_optimizer_or_scheduler_of_another_shape_or_class_is_refused(tmp_path: Path) -> None:
    def make(width: int, kind: Any = torch.optim.Adam) -> torch.optim.Optimizer:
        model = nn.Linear(2, width)
        optimizer = kind(model.parameters(), lr=0.1)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        return optimizer

    saved = make(3)
    scheduler = torch.optim.lr_scheduler.StepLR(saved, 5)
    path = Checkpointer(tmp_path).save(1, optimizer=saved, scheduler=scheduler)
    narrow = make(5)
    before = str(narrow.state_dict())
    message = (
        r"optimizer has tensor 0 of group 0 of shape \(3, 2\) there, of \(5, 2\) here\n.*tensor 1 .*\(3,\) .*\(5,\)"
    )
    with pytest.raises(CheckpointError, match=message):
        Checkpointer(tmp_path).load(path, optimizer=narrow)
    assert str(narrow.state_dict()) == before
    other = torch.optim.lr_scheduler.ExponentialLR(narrow, 0.5)
    with pytest.raises(CheckpointError, match="scheduler is StepLR there, ExponentialLR here"):
        Checkpointer(tmp_path).load(path, scheduler=other)


def test_an_optimizer_of_named_parameters_in_another_order_is_refused(tmp_path: Path) -> None:
    def make(order: str, wrap: Any = None) -> torch.optim.Optimizer:
        model = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in "abc"})
        named = dict((wrap(model) if wrap else model).named_parameters())
        ordered = [next((name, p) for name, p in named.items() if f"{one}.weight" in name) for one in order]
        groups = [{"params": ordered[:2]}, {"params": ordered[2:], "lr": 0.5}]
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9)

    checkpoints = Checkpointer(tmp_path)
    path = checkpoints.save(1, optimizer=make("abc"))
    for wrap in (None, DataParallel, compiled):  # whose names have a prefix
        checkpoints.load(path, optimizer=make("abc", wrap))
    for order, message in {
        "bac": r"optimizer has a.weight as tensor 0 of group 0 there, b.weight here.*\n.*has b.weight as tensor 1",
        "acb": "optimizer has b.weight as tensor 1 of group 0 there, c.weight here: make it of the parameters in the",
    }.items():
        for wrap in (None, DataParallel):
            with pytest.raises(CheckpointError, match=message):
                checkpoints.load(path, optimizer=make(order, wrap))
    two_nets = [nn.Linear(2, 2), nn.Linear(2, 2)]  # whose parameters have the same names
    twins = torch.optim.SGD([{"params": net.named_parameters()} for net in two_nets], lr=0.1)
    checkpoints.load(checkpoints.save(2, optimizer=twins), optimizer=twins)
    unnamed = torch.optim.SGD([{"params": [p]} for p in nn.Linear(2, 2).parameters()], lr=0.1)
    checkpoints.load(checkpoints.save(3, optimizer=unnamed), optimizer=unnamed)


def adam(value: float, dtype: torch.dtype, kind: type[torch.optim.Adam] = torch.optim.Adam) -> torch.optim.Adam:
    """An optimizer after a step with a gradient of this value."""
    parameter = nn.Parameter(torch.zeros(2, dtype=dtype))
    parameter.grad = torch.full_like(parameter, value)
    optimizer = kind([parameter], lr=1e-3)
    optimizer.step()
    return optimizer


class Wide(torch.optim.Adam):
    """An optimizer that keeps its state in float32, whatever its parameters are."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        (parameter,) = self.param_groups[0]["params"]
        self.state[parameter] = dict(state_dict["state"][0])


def test_an_optimizer_whose_dtype_does_not_hold_the_saved_state_is_refused(tmp_path: Path) -> None:
    checkpoints = Checkpointer(tmp_path)
    small, large = checkpoints.save(1, optimizer=adam(1.0, torch.float32)), tmp_path / "step-000000002.pt"
    checkpoints.save(2, optimizer=adam(1e4, torch.float32))  # whose square's mean is 1e5
    half = adam(0.5, torch.float16)
    before = copy.deepcopy(half.state_dict())
    with pytest.raises(
        CheckpointError, match=r"optimizer has state\[0\]\.exp_avg_sq of float32 there, of float16 here"
    ):
        checkpoints.load(large, optimizer=half)
    assert same(half.state_dict(), before)
    checkpoints.load(small, optimizer=half)
    assert half.state[half.param_groups[0]["params"][0]]["exp_avg_sq"].tolist() == pytest.approx([1e-3] * 2, rel=1e-3)
    checkpoints.load(large, optimizer=adam(1.0, torch.bfloat16))
    wide = checkpoints.save(3, optimizer=adam(1e4, torch.float32, Wide))
    checkpoints.load(wide, optimizer=adam(0.5, torch.float16, Wide))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lr": "high"}, "has lr='high' in group 0 there, float here"),
        ({"lr": "\x1b[31m" + 100 * "x"}, r"has lr='\\x1b\[31mx* in group 0 there"),
        ({"betas": [0.9, "0.99"]}, r"has betas=\[0.9, '0.99'\] in group 0 there, tuple here"),
    ],
)
def test_a_setting_that_is_text_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    optimizer = torch.optim.Adam(nn.Linear(1, 1).parameters())
    state = optimizer.state_dict()
    state["param_groups"][0].update(change)
    path = Checkpointer(tmp_path).save(1, optimizer=state)
    with pytest.raises(CheckpointError, match=message):
        Checkpointer(tmp_path).load(path, optimizer=optimizer)
    assert optimizer.param_groups[0]["lr"] == 1e-3


@pytest.mark.parametrize(
    "change", [{"lr": torch.tensor(0.1)}, {"lr": 1}, {"betas": [0, 1]}, {"foreach": True}, {"name": "all"}]
)
def test_a_setting_may_be_another_kind_of_number_and_others_are_torchs(change: dict[str, Any], tmp_path: Path) -> None:
    optimizer = torch.optim.Adam(nn.Linear(1, 1).parameters())
    state = optimizer.state_dict()
    state["param_groups"][0].update(change)
    path = Checkpointer(tmp_path).save(1, optimizer=state)
    Checkpointer(tmp_path).load(path, optimizer=optimizer)
    (name, value) = next(iter(change.items()))
    assert optimizer.param_groups[0][name] == value


@pytest.mark.parametrize("change", [{"last_epoch": "high"}, {"base_lrs": ["high"]}])
def test_a_number_of_a_scheduler_that_is_text_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    before = scheduler.state_dict()
    path = Checkpointer(tmp_path).save(1, scheduler=before | change)
    with pytest.raises(CheckpointError, match=f"has {next(iter(change))}=.*high.* there, (int|list) here"):
        Checkpointer(tmp_path).load(path, scheduler=scheduler)
    assert scheduler.state_dict() == before
