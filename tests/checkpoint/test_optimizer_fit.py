"""The fit of saved states to optimizers and schedulers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
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
    first = r"optimizer has tensor 0 of group 0 of shape \(3, 2\) in the checkpoint, \(5, 2\) here"
    message = rf"{first}\n.*tensor 1 .*\(3,\) .*\(5,\)"
    with pytest.raises(CheckpointError, match=message):
        Checkpointer(tmp_path).load(path, optimizer=narrow)
    assert str(narrow.state_dict()) == before
    other = torch.optim.lr_scheduler.ExponentialLR(narrow, 0.5)
    with pytest.raises(CheckpointError, match="scheduler is StepLR in the checkpoint, ExponentialLR here"):
        Checkpointer(tmp_path).load(path, scheduler=other)


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
