"""Saved tensors that differ, loaded into memory that is shared."""

from __future__ import annotations

from pathlib import Path

import pytest
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
    return said


@pytest.mark.parametrize("nprocs", [1, 2])
def test_tensors_that_differ_are_not_loaded_into_one(tmp_path: Path, nprocs: int) -> None:
    for said in on_ranks(load_into_shared_memory, nprocs, str(tmp_path)):
        one, wrapped, actor, critic = said
        for text in (one, wrapped):
            assert (
                "model['first.weight'] and model['second.weight'] differ in the checkpoint, but share memory here"
                in text
            )
        assert "actor['first.weight'] and critic['second.weight'] differ in the checkpoint" in actor
        assert "critic['second.weight'] and actor['first.weight'] differ in the checkpoint" in critic
