"""Arguments of a Checkpointer: numbers of all kinds, bad ones, and those that differ by rank."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import on_ranks
from runs import (
    Counter,
    Loud,
)

import ddpkit
from ddpkit.checkpoint.checkpointer import Checkpointer
from ddpkit.errors import DdpkitError


def test_numbers_of_numpy_and_torch_are_numbers(tmp_path: Path) -> None:
    checkpoints = Checkpointer(tmp_path, keep=np.int32(2))
    for step in (np.int64(1), np.uint8(2), torch.tensor(3)):
        checkpoints.save(step, fill=torch.full((1,), int(step)))
    assert checkpoints.steps() == [2, 3] and checkpoints.load_latest()["step"] == 3


def test_bad_arguments_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="file is a file"):
        Checkpointer(tmp_path / "file")
    for keep in (0, -1, 1.5, True, np.int64(0)):
        with pytest.raises(ValueError, match="keep must be"):
            Checkpointer(tmp_path, keep=keep)  # type: ignore[arg-type]
    for step in (-1, 1.0, True, "1", np.float64(1), np.bool_(True), None):
        with pytest.raises(ValueError, match="step must be"):
            Checkpointer(tmp_path).save(step)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="per_rank cannot hold step: load"):
        Checkpointer(tmp_path).save(1, per_rank={"step": 7, "mine": 1, "score": 2.0})
    assert os.listdir(tmp_path) == ["file"]


def differ(folder: str) -> dict[str, str]:
    rank, checkpoints = ddpkit.get_rank(), Checkpointer(folder)
    checkpoints.save(1, note=0)
    counter = Counter(0)
    calls = {
        "step": lambda: checkpoints.save(rank + 5, note=1),
        "score": lambda: checkpoints.save(5, score=rank, note=1),
        "names": lambda: checkpoints.save(5, **{f"note{rank}": 1}),
        "bad step": lambda: checkpoints.save(-1 if rank else 5, note=1),
        "twice": lambda: checkpoints.save(5, note=1, per_rank={"note": 1} if rank else {}),
        "targets": lambda: checkpoints.load_latest(**({"model": counter} if rank else {})),
        "load": lambda: checkpoints.load(f"{folder}/step-000000001.pt", **({"model": counter} if rank else {})),
        "no target": lambda: checkpoints.load_latest(model="x" if rank else counter),
        "calls": lambda: checkpoints.load_latest() if rank else checkpoints.load_best(),
        "no dict": lambda: checkpoints.save(5, note=1, per_rank=5 if rank == 1 else None),
        "no names": lambda: checkpoints.save(5, note=1, per_rank={7: 1} if rank == 1 else None),
        "no path": lambda: checkpoints.load(None if rank == 1 else f"{folder}/step-000000001.pt"),
        "no text": lambda: checkpoints.load(f"{folder}/\udcff.pt"),
        "null": lambda: checkpoints.load(f"{folder}/\0.pt" if rank == 1 else f"{folder}/step-000000001.pt"),
        "long": lambda: checkpoints.load_latest(note=Loud("x" * (9 << 20)) if rank == 1 else Loud("")),
        "odd": lambda: checkpoints.load_latest(note=Loud("cannot read \udcff") if rank == 1 else Loud("")),
    }
    said = {}
    for name, call in calls.items():
        try:
            call()
            said[name] = "went on"
        except (DdpkitError, ValueError, TypeError) as error:
            said[name] = f"{type(error).__name__}: {error}"
    assert checkpoints.steps() == [1]
    return said


@pytest.mark.parametrize("nprocs", [2, 3])
def test_ranks_that_differ_in_their_arguments_all_raise(tmp_path: Path, nprocs: int) -> None:
    for rank, said in enumerate(on_ranks(differ, nprocs, str(tmp_path))):
        assert "MismatchError" in said["step"] and "step: 5 on rank 0; 6 on rank 1" in said["step"]
        assert "score: 0.0 on rank 0; 1.0 on rank 1" in said["score"]
        assert "names: note0 on rank 0; note1 on rank 1" in said["names"]
        assert ("ValueError: step must be" in said["bad step"]) and (rank or "rank 1: ValueError" in said["bad step"])
        assert "Passed both in per_rank and as keyword: " in said["twice"]
        assert "MismatchError" in said["targets"] and "MismatchError" in said["load"]
        assert "has no load_state_dict()" in said["no target"]
        assert "different collectives" in said["calls"]
        for case in ("no dict", "no names", "no path"):
            words = "PathLike" if case == "no path" else "per_rank must be a dict of values by name"
            assert said[case].startswith("TypeError" if rank == 1 else "MismatchError"), said[case]
            assert words in said[case]
        assert "Cannot read" in said["no text"] and "\\udcff.pt" in said["no text"]
        assert "null byte" in said["null"]
        for case, words in {"long": "xxxxxxxx", "odd": "cannot read \\udcff"}.items():
            assert said[case].startswith("CheckpointError") and words in said[case], said[case][:1000]
            assert len(said[case]) < 50_000


@pytest.mark.ranks(1, 2, 3)
def test_a_relative_folder_in_another_directory_on_one_rank_is_refused_at_the_first_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank, size = ddpkit.get_rank(), ddpkit.get_world_size()
    monkeypatch.chdir(tmp_path)
    Checkpointer("same").save(1, note=1)
    mine = tmp_path / f"{rank}"
    mine.mkdir()
    monkeypatch.chdir(mine)
    Checkpointer(tmp_path / "shared").save(1, note=1)
    checkpoints = Checkpointer("checkpoints")
    for call in (lambda: checkpoints.save(1, note=1), checkpoints.load_latest):
        if size == 1:
            call()
            continue
        with pytest.raises(ddpkit.MismatchError, match=r"folder \(pass an absolute path\): .*/0/checkpoints on rank 0"):
            call()
        assert not (mine / "checkpoints").exists()
