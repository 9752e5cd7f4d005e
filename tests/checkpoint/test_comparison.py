"""States that differ between ranks are refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from conftest import on_ranks
from runs import (
    OwnPart,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddpkit
from ddpkit.checkpoint.checkpointer import Checkpointer
from ddpkit.errors import CheckpointError


def save_what_differs(folder: str) -> dict[str, str]:
    rank, checkpoints, said = ddpkit.get_rank(), Checkpointer(folder), {}
    torch.manual_seed(rank)
    params = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))]
    sharded = torch.optim.Adam(params)
    params[rank].grad = torch.ones(3)
    sharded.step()  # has state for one of them
    bn = nn.BatchNorm1d(2)
    bn(torch.randn(4, 2))
    own = DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), broadcast_buffers=False)
    own(torch.randn(4, 2))
    cases: dict[str, Any] = {
        "optimizer": sharded,
        "part": OwnPart(float(rank)),
        "model": nn.Linear(2, 2),
        "number": {"mine": [1, rank]},
        "kind": 1 if rank else 1.0,
        "extra": {"a": 1, "b": 2} if rank else {"a": 1},
        "buffers": bn,
        "own": own,
        "text": "x" * 500 + str(rank),
    }
    for name, value in cases.items():
        try:
            checkpoints.save(1, **{name: value}, same=torch.ones(3))
            said[name] = "went on"
        except CheckpointError as error:
            said[name] = str(error)
    assert checkpoints.steps() == []
    return said


def test_what_differs_between_ranks_is_named_and_not_saved(tmp_path: Path) -> None:
    one, two = on_ranks(save_what_differs, 2, str(tmp_path))
    assert one == two
    assert "optimizer.state[0].exp_avg: float32[3] #" in one["optimizer"] and "missing on rank 1" in one["optimizer"]
    assert "part.state[0].moment: float32[2] #" in one["part"] and "float32[3] #" in one["part"]
    assert "2 entries differ between ranks" in one["model"] and "model.weight" in one["model"]
    assert "number.mine[1]: 0 on rank 0; 1 on rank 1" in one["number"]
    assert "kind: 1.0 on rank 0; 1 on rank 1" in one["kind"]
    assert "extra.b: missing on rank 0; 2 on rank 1" in one["extra"]
    assert "buffers.running_mean" in one["buffers"] and "sync_buffers" in one["buffers"]
    assert "own['1.running_mean']" in one["own"] and "own['0" not in one["own"]
    assert "text: str #" in one["text"]
    assert all("per_rank={name: value}" in text and "same" not in text.split("\n")[1] for text in one.values())
