"""The states of generators: of a kind that a checkpoint cannot bring back, a save says so."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from conftest import on_ranks
from torch import nn

import ddpkit
from ddpkit import Checkpointer, CheckpointError, PeerError


def with_another_kind(folder: str) -> list[str]:
    model = nn.Linear(2, 1)
    nn.init.ones_(model.weight), nn.init.ones_(model.bias)
    checkpoints = Checkpointer(folder)
    checkpoints.save(1, model=model)
    former = np.random.get_bit_generator()
    if ddpkit.get_rank() == ddpkit.get_world_size() - 1:
        np.random.set_bit_generator(np.random.PCG64(3))
    try:
        with pytest.raises((CheckpointError, PeerError)) as caught:
            checkpoints.save(2, model=model)
    finally:
        np.random.set_bit_generator(former)
    return [str(caught.value), str(checkpoints.steps())]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_another_kind_than_numpys_default_is_refused_by_a_save_on_every_rank(tmp_path: Path, world: int) -> None:
    for text, steps in on_ranks(with_another_kind, world, str(tmp_path)):
        assert "uses PCG64, and its state cannot be saved" in text and steps == "[1]"
