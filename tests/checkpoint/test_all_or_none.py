"""Failures of one rank, which all ranks raise."""

from __future__ import annotations

import os
import re
import resource
import shutil
from pathlib import Path

import torch
from conftest import on_ranks
from runs import (
    flat,
    message_of,
    net,
)

import ddpkit
from ddpkit.checkpoint.checkpointer import Checkpointer


def fails_on_one_rank(folder: str) -> dict[str, str]:
    rank, checkpoints = ddpkit.get_rank(), Checkpointer(folder)
    said = {}
    path = checkpoints.save(1, model=net(), fill=torch.full((10,), 1))

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))  # a disk that is full after 100 kB
    said["full"] = message_of(checkpoints.save, 2, fill=torch.full((100_000,), 2))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    said["no folder"] = message_of(Checkpointer(path / "below a file").save, 2)

    model = net(3 if rank == 0 else 5)
    before = flat(model)
    said["other model"] = message_of(checkpoints.load_latest, model=model)
    assert flat(model) == before
    checkpoints.save(2, fill=torch.full((10,), 2))
    said["missing file"] = message_of(checkpoints.load, path if rank == 0 else "elsewhere.pt")
    shutil.copy(path, f"{folder}/copy-{rank}.pt")
    if rank:
        os.truncate(f"{folder}/copy-{rank}.pt", 1000)
    said["damaged copy"] = message_of(checkpoints.load, f"{folder}/copy-{rank}.pt")
    said["other file"] = message_of(checkpoints.load, [path, f"{folder}/step-000000002.pt"][rank])
    os.truncate(f"{folder}/step-000000002.pt", 1000)
    said["newest broken"] = f"step {checkpoints.load_latest()['step']}"
    os.truncate(path, 1000)
    said["all broken"] = message_of(checkpoints.load_latest)
    return said


def test_a_failure_on_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    said, same = on_ranks(fails_on_one_rank, 2, str(tmp_path))
    assert "2 different files" in said.pop("other file") and "2 different files" in same.pop("other file")
    assert said == same
    assert "Cannot write to" in said["full"] and "File too large" in said["full"]
    assert "Not a directory" in said["no folder"]
    assert said["other model"].startswith("Rank 1: ") and "0.weight of shape" in said["other model"]
    assert re.match(r"Rank 1: Cannot read /.*/elsewhere.pt: \[Errno 2\] No such file", said["missing file"])
    assert said["damaged copy"].startswith("Rank 1: Cannot read ") and "truncated" in said["damaged copy"]
    assert said["newest broken"] == "step 1"
    assert "No checkpoint in" in said["all broken"] and said["all broken"].count("truncated") == 2
