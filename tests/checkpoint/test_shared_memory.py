"""Saved tensors that differ, loaded into memory that is shared."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from conftest import on_ranks
from torch import nn

import ddpkit
from ddpkit.checkpoint.checkpointer import Checkpointer
from ddpkit.errors import CheckpointError


class Two(nn.Module):
    """A model with two layers, which may be one."""

    def __init__(self, tied: bool, value: float = 0.0, other: float = 0.0) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
        nn.init.constant_(self.first.weight, value)
        nn.init.constant_(self.second.weight, other)
        if tied:
            self.second.weight = self.first.weight


def load_into_shared_memory(folder: str) -> list[str]:
    checkpoints = Checkpointer(folder, keep=9)
    apart = checkpoints.save(1, model=Two(False, 1.0, 2.0))
    equal = checkpoints.save(2, model=Two(False, 3.0, 3.0))
    tied = checkpoints.save(3, model=Two(True, 4.0))
    said = []
    for wrap in (lambda model: model, ddpkit.wrap_model):
        model = Two(True, 5.0)
        with pytest.raises(CheckpointError) as caught:
            checkpoints.load(apart, model=wrap(model))
        said.append(str(caught.value))
        assert model.second.weight.unique().tolist() == [5.0]
        for path, value in ((equal, 3.0), (tied, 4.0)):
            checkpoints.load(path, model=wrap(Two(True)))
            checkpoints.load(path, model=model)
            assert model.second.weight.unique().tolist() == [value]
            checkpoints.load(path, model=Two(False))
    actor, critic = Two(False), Two(False)
    path = checkpoints.save(4, actor=Two(False, 1.0, 2.0), critic=Two(False, 3.0, 4.0))
    checkpoints.load(path, actor=actor, critic=critic)
    critic.second = actor.first  # one layer in both
    for names in ({"actor": actor, "critic": critic}, {"critic": critic, "actor": actor}):
        with pytest.raises(CheckpointError) as caught:
            checkpoints.load(path, **names)
        said.append(str(caught.value))
    checkpoints.load(checkpoints.save(5, actor=actor, critic=critic), actor=actor, critic=critic)
    memory = torch.arange(6.0)
    overlapping = nn.Module()
    overlapping.register_buffer("all", memory)
    overlapping.register_buffer("odd", memory[1::2])
    overlapping.register_buffer("even", memory[::2])
    path = checkpoints.save(6, model=overlapping)
    checkpoints.load(path, model=overlapping)
    separate = copy.deepcopy(overlapping)
    separate.odd = separate.odd + 1
    with pytest.raises(CheckpointError) as caught:
        checkpoints.load(checkpoints.save(7, model=separate), model=overlapping)
    said.append(str(caught.value))
    return said


@pytest.mark.parametrize("nprocs", [1, 2])
def test_tensors_that_differ_are_not_loaded_into_one(tmp_path: Path, nprocs: int) -> None:
    for said in on_ranks(load_into_shared_memory, nprocs, str(tmp_path)):
        one, wrapped, actor, critic, overlapping = said
        for text in (one, wrapped):
            assert "model['first.weight'] and model['second.weight'] differ there, but share memory here" in text
        assert "actor['first.weight'] and critic['second.weight'] differ there" in actor
        assert "critic['second.weight'] and actor['first.weight'] differ there" in critic
        assert "model.all and model.odd differ there" in overlapping and "even" not in overlapping
