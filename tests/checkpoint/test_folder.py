"""The list of checkpoints in a folder: which are kept, deleted and found, in which order."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import on_ranks
from runs import (
    files_in,
    message_of,
    newest_step,
    save_one,
)

from ddpkit.checkpoint.checkpointer import Checkpointer


def test_only_the_last_written_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpointer(tmp_path / "deep" / "run", keep=2)
    for step in (100, 200, 300, 150):  # back to 200, and on from there
        checkpoints.save(step, fill=torch.full((10,), step))
    assert files_in(checkpoints.folder) == ["latest", "step-000000150.pt", "step-000000300.pt"]
    assert (checkpoints.folder / "latest").read_text() == "step-000000150.pt\nstep-000000300.pt\n"
    assert newest_step(checkpoints.folder) == 150
    (checkpoints.folder / "latest").rename(tmp_path / "latest")
    assert newest_step(checkpoints.folder) == 300


def test_a_checkpointer_deletes_what_one_before_it_has_kept(tmp_path: Path) -> None:
    for step in (0, 1, 2):
        Checkpointer(tmp_path, keep=5).save(step)
    checkpoints = Checkpointer(tmp_path, keep=1)
    checkpoints.save(3)
    assert checkpoints.steps() == [3]
    assert Checkpointer(tmp_path / "missing").load_latest() is None


def test_neither_clock_nor_copying_changes_the_order(tmp_path: Path) -> None:
    checkpoints = Checkpointer(tmp_path, keep=2)
    for step, clock in ((1, 3_000_000), (2, 2_000_000), (3, 1_000_000), (4, 500_000)):  # a clock that is set back
        path = checkpoints.save(step, fill=torch.full((10,), step))
        os.utime(path, (clock, clock))
        assert newest_step(tmp_path) == step
    assert checkpoints.steps() == [3, 4]


def test_a_file_that_latest_lost_is_found_by_its_step(tmp_path: Path) -> None:
    checkpoints = Checkpointer(tmp_path)
    for step in (9, 10):
        checkpoints.save(step, fill=torch.full((10,), step))
    for text in ("", "step-000000011.pt\n", "\0\xff nonsense 5\n../step-000000009.pt\nstep-000000010.pt x\n"):
        (tmp_path / "latest").write_text(text)
        assert newest_step(tmp_path) == 10 and checkpoints.steps() == [9, 10]


def save_where_latest_cannot_be_written(folder: str) -> str:
    checkpoints = Checkpointer(folder, keep=1, keep_best=1)
    return message_of(checkpoints.save, 2, score=2.0, fill=torch.full((10,), 2))


@pytest.mark.parametrize("nprocs", [1, 2, 3])
def test_a_checkpoint_that_cannot_be_listed_is_said_to_be_complete(tmp_path: Path, nprocs: int) -> None:
    Checkpointer(tmp_path).save(1, score=1.0, fill=torch.full((10,), 1))
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").mkdir()
    for said in on_ranks(save_where_latest_cannot_be_written, nprocs, str(tmp_path)):
        path = re.escape(str(tmp_path / "step-000000002.pt"))
        assert re.match(rf"Saved {path}, which is complete, but cannot list it in .*latest: ", said), said
        assert "load(path) loads this one. No older one was deleted." in said
    assert Checkpointer(tmp_path).load(tmp_path / "step-000000002.pt")["step"] == 2
    (tmp_path / "latest").rmdir()
    assert newest_step(tmp_path) == 2 and Checkpointer(tmp_path).steps() == [1, 2]


def test_nothing_but_its_own_is_deleted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoints = Checkpointer(tmp_path, keep=1)
    theirs = ["step-best.pt", "step-5.pt", "step-best.pt.tmp", "step-000000000.pt.bak", "my-step-000000001.pt"]
    for name in theirs:
        (tmp_path / name).write_bytes(b"the user's")
    for name in ("step-old.pt", "step-000000003.pt.tmp.d", "step-000000999.pt.tmp"):
        (tmp_path / name).mkdir()
    shutil.copy(save_one(tmp_path / "elsewhere", 7), tmp_path / "step-000000007.pt")
    for step in (10, 11, 12):
        checkpoints.save(step, fill=torch.full((10,), step))
    assert set(theirs) | {"step-old.pt", "step-000000007.pt", "step-000000012.pt"} <= set(os.listdir(tmp_path))
    assert checkpoints.steps() == [7, 12] and not caplog.records


def test_a_checkpoint_that_cannot_be_deleted_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpointer(tmp_path, keep=1)
    checkpoints.save(1, fill=torch.full((10,), 1))
    unlink = Path.unlink

    def refuse(path: Path, missing_ok: bool = False) -> None:  # as a mounted folder, or a file that is open elsewhere
        if path.suffix == ".pt":
            raise PermissionError(1, "Operation not permitted", str(path))
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", refuse)
    checkpoints.save(2, fill=torch.full((10,), 2))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "Saved" in caplog.text and "step-000000002.pt, but could not delete an old checkpoint: " in caplog.text
    assert newest_step(tmp_path) == 2 and checkpoints.steps() == [1, 2]


def test_the_best_are_kept_and_loaded_by_score(tmp_path: Path) -> None:
    checkpoints = Checkpointer(tmp_path, keep=1, keep_best=2)
    assert checkpoints.load_best() is None
    scores = {1: 0.5, 2: 0.9, 3: None, 4: float("nan"), 5: np.float64(0.9), 6: -float("inf"), 7: 0.1}
    for step, score in scores.items():
        checkpoints.save(step, score=score, fill=torch.full((10,), step))
    assert checkpoints.steps() == [2, 5, 7]
    best = Checkpointer(tmp_path).load_best()
    assert (best["step"], best["score"]) == (5, 0.9)
    os.truncate(tmp_path / "step-000000005.pt", 100)
    assert Checkpointer(tmp_path).load_best()["step"] == 2
    assert Checkpointer(tmp_path).load_latest()["step"] == 7
    with pytest.raises((TypeError, ValueError)):
        checkpoints.save(8, score="good")
    checkpoints.save(2, score=0.0)  # written again: it is another one now
    assert checkpoints.steps() == [2, 5, 7]


def test_foreign_files_stay_and_leftovers_of_a_killed_writer_go(tmp_path: Path) -> None:
    save_one(tmp_path)
    for name in ("step-000000002.pt.tmp", "latest.tmp", "notes.txt", "model.pt"):
        (tmp_path / name).write_bytes(b"half")
    assert newest_step(tmp_path) == 1
    save_one(tmp_path, 3)
    assert files_in(tmp_path) == ["latest", "model.pt", "notes.txt", "step-000000001.pt", "step-000000003.pt"]
