"""Files that are whole, but odd: of other formats, or with random states of other versions."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import (
    flat,
    net,
    save_one,
)

from ddpkit.checkpoint.checkpointer import Checkpointer
from ddpkit.checkpoint.files import dump
from ddpkit.errors import CheckpointError


def test_a_checkpoint_of_another_format_says_so(tmp_path: Path) -> None:
    with open(tmp_path / "step-000000001.pt", "wb") as file:
        dump({"format": 3}, file)
    with pytest.raises(CheckpointError, match="its format is 3, this ddpkit reads 1 and 2"):
        Checkpointer(tmp_path).load_latest()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: [1, 2], "its format is None, this ddpkit reads 1 and 2"),
        (lambda content: content | {"format": "\x1b[31m"}, r"its format is \\x1b\[31m,"),
        (lambda content: content | {"sharded": 3}, "it has no valid 'sharded'"),
        (
            lambda content: content | {"sharded": {"folder": "", "tensors": {"model": {"pieces": []}}}},
            "no valid 'sharded'",
        ),
        (
            lambda content: content | {"sharded": {"folder": "../..", "tensors": {}}},
            "Cannot read .* its folder of pieces",
        ),
    ],
)
def test_an_odd_file_is_refused_and_the_one_before_it_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, change: Any, message: str
) -> None:
    save_one(tmp_path, 1, model=net())
    path = save_one(tmp_path, 2, model=net())
    content = torch.load(path, weights_only=True)
    with open(path, "wb") as file:
        dump(change(content), file)
    model, drawn = net(), torch.get_rng_state()
    before = flat(model)
    with pytest.raises(CheckpointError, match=message):
        Checkpointer(tmp_path).load(path, model=model)
    assert flat(model) == before and torch.equal(torch.get_rng_state(), drawn)
    assert Checkpointer(tmp_path).load_latest(model=model)["step"] == 1
    assert re.search(message, caplog.text)


def test_random_states_of_another_version_leave_nothing_silent(tmp_path: Path) -> None:
    path = save_one(tmp_path, 1, model=net())
    content = torch.load(path, weights_only=True)
    content["rng"][0]["python"] = (4, [1], None)
    with open(path, "wb") as file:
        dump(content, file)
    with pytest.raises(CheckpointError, match="(?s)ValueError: state with version 4.* undefined state"):
        Checkpointer(tmp_path).load_latest(model=net())
    assert Checkpointer(tmp_path).load(path)["step"] == 1
