"""The fit of saved models to those at hand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from torch import nn

from ddpkit.checkpoint.checkpointer import Checkpointer
from ddpkit.errors import CheckpointError


def test_what_does_not_fit_is_named_in_the_models_order_so_that_ranks_agree(tmp_path: Path) -> None:
    narrow, wide = (nn.Sequential(*(nn.Linear(size, size) for _ in range(4))) for size in (2, 3))
    Checkpointer(tmp_path).save(1, model=narrow)
    with pytest.raises(CheckpointError) as caught:
        Checkpointer(tmp_path).load_latest(model=wide)
    assert re.findall(r"model has (\S+) of shape", str(caught.value)) == list(wide.state_dict())


def test_nothing_is_loaded_into_what_takes_no_values(tmp_path: Path) -> None:
    checkpoints = Checkpointer(tmp_path)
    path = checkpoints.save(1, model=nn.Linear(2, 2))
    with pytest.raises(CheckpointError, match=r"model has weight on the meta device here, which .* to_empty\(\)"):
        checkpoints.load(path, model=nn.Linear(2, 2, device="meta"))
