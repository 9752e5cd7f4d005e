"""Loads that fail halfway: every rank says so, and a later load repairs what was loaded in part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import on_ranks, same
from runs import (
    Halves,
    run_with,
)
from torch import nn

import ddpkit
from ddpkit.checkpoint.checkpointer import Checkpointer
from ddpkit.errors import CheckpointError


class Strict(nn.Linear):
    """Raises when its extra state comes, after its tensors and those before it have been changed."""

    def get_extra_state(self) -> int:
        return 1

    def set_extra_state(self, state: int) -> None:
        raise ValueError("no extra state today")


class Overridden(nn.Linear):
    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        super().load_state_dict(*args, **kwargs)
        raise ValueError("overridden")


class Fussy(torch.optim.Adam):
    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state)
        raise ValueError("fussy")


def hooked() -> nn.Module:
    model = nn.Linear(2, 2)

    def hook(*_: Any) -> None:
        raise ValueError("hooked")

    model.register_load_state_dict_post_hook(hook)
    return model


def fails_halfway(folder: str) -> list[str]:
    rank, last = ddpkit.get_rank(), ddpkit.get_world_size() - 1
    breaking = {
        "no extra state today": ("last", lambda: nn.Sequential(nn.Linear(2, 2), Strict(2, 2)), nn.Module),
        "overridden": ("last", lambda: Overridden(2, 2), nn.Module),
        "hooked": ("last", hooked, nn.Module),
        "fussy": ("last", lambda: Fussy(nn.Linear(2, 2).parameters()), object),
        "halves": ("halves", lambda: Halves(1, fails=True), object),
    }
    said = []
    for number, (message, (name, make, _)) in enumerate(breaking.items()):
        torch.manual_seed(0)
        saved = run_with(7, **{name: Halves(7) if name == "halves" else make()})
        path = Checkpointer(folder).save(number, **saved)
        torch.manual_seed(1)
        objects = run_with(1, **{name: make()})
        if rank != last:  # only on the last rank does it fail
            objects[name] = Halves(1) if name == "halves" else objects[name]
        with pytest.raises(CheckpointError, match=f"Cannot load .*: (Rank {last}: )?.*{message}") as caught:
            Checkpointer(folder).load(path, **objects)
        assert "The objects are in an undefined state on every rank" in str(caught.value)
        good = run_with(1)
        fitting = {key: objects[key] for key in good if key != name}  # those that take their state
        Checkpointer(folder).load(path, **fitting)
        assert same(fitting["model"].state_dict(), saved["model"].state_dict())
        fitting["optimizer"].step()
        said.append(message)
    return said


@pytest.mark.parametrize("nprocs", [1, 2, 3])
def test_what_fails_halfway_is_said_on_every_rank_and_may_be_loaded_again(tmp_path: Path, nprocs: int) -> None:
    for said in on_ranks(fails_halfway, nprocs, str(tmp_path), timeout=60.0):
        assert len(said) == 5


def test_what_takes_no_state_is_refused(tmp_path: Path) -> None:
    path = Checkpointer(tmp_path).save(1, halves=Halves(7))
    with pytest.raises(TypeError, match=r"has no load_state_dict\(\)"):
        Checkpointer(tmp_path).load(path, halves=nn.Linear(1, 1).weight)
