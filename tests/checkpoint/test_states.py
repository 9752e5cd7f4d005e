"""States of models: saved under their own names, and loaded from files with other names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import on_ranks, same
from runs import (
    compiled,
)
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ddpkit.checkpoint.checkpointer import Checkpointer
from ddpkit.checkpoint.states import module_state


class Only(nn.Module):
    """A model whose only child is called as wrappers call theirs."""

    def __init__(self, child: nn.Module | None = None) -> None:
        super().__init__()
        self.module = child or nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)


class Twice(nn.Module):
    """Shares a layer, and keeps a state of its own beside its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self._orig_mod = nn.BatchNorm1d(2)
        self.again = self._orig_mod
        self.note = "new"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._orig_mod(x)

    def get_extra_state(self) -> str:
        return self.note

    def set_extra_state(self, note: str) -> None:
        self.note = note


def inside(wrap: Any) -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), Only(), Twice())
    model[0], model[1].module = wrap(model[0]), wrap(model[1].module)
    return model


MODELS = {"only": Only, "only twice": lambda: Only(Only()), "shared": Twice, "plain": lambda: inside(lambda m: m)}


def wrapped_in_all_ways(folder: str) -> None:
    def ddp(model: nn.Module) -> nn.Module:
        return DistributedDataParallel(model) if dist.is_initialized() else model

    ways = {
        "ddp": ddp,
        "dp": DataParallel,
        "compiled": compiled,
        "compiled ddp": lambda model: compiled(ddp(model)),
        "ddp of compiled": lambda model: ddp(compiled(model)),
        "dp of compiled": lambda model: DataParallel(compiled(model)),
    }
    step = 0
    for make in MODELS.values():
        for wrap in ways.values():
            torch.manual_seed(0)
            model = wrap(make())
            saved_and_loaded(folder, step := step + 1, model, make)
    for wrap in (compiled, DataParallel, ddp):
        torch.manual_seed(0)
        saved_and_loaded(folder, step := step + 1, wrap(inside(wrap)), MODELS["plain"])
        saved_and_loaded(folder, step := step + 1, inside(wrap), MODELS["plain"])


def saved_and_loaded(folder: str, step: int, model: nn.Module, make: Any) -> None:
    path = Checkpointer(folder).save(step, model=model)
    plain, again = make(), make()
    state = torch.load(path, weights_only=True)["state"]["model"]
    assert list(state) == list(plain.state_dict()) and state._metadata.keys() == plain.state_dict()._metadata.keys()
    plain.load_state_dict(state)  # as everybody would without this library
    Checkpointer(folder).load(path, model=again)
    assert same(dict(plain.state_dict()), dict(module_state(model))) and same(dict(again.state_dict()), dict(state))
    nn.init.normal_(next(plain.parameters()))
    Checkpointer(folder).load(path, model=model)
    assert same(dict(module_state(model)), dict(state))


@pytest.mark.parametrize("nprocs", [1, pytest.param(2, marks=pytest.mark.storm)])
def test_models_are_saved_under_torchs_own_names_however_wrapped(tmp_path: Path, nprocs: int) -> None:
    on_ranks(wrapped_in_all_ways, nprocs, str(tmp_path), timeout=60.0)
