"""The fit of saved states to optimizers and schedulers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import same
from torch import nn

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
