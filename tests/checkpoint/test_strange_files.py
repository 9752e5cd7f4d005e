"""Who can write to the folder of checkpoints has put other things there than files."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import nn

from ddpkit.checkpoint.checkpointer import Checkpointer
from ddpkit.errors import CheckpointError
from ddpkit.sharded import write_pieces

OURS = [".writer", "step-000000001.pt.tmp", "step-000000001.pt", "latest.tmp", "latest"]


def ends(call: Callable[[], object], seconds: float = 20.0) -> BaseException | None:
    """Call it on a thread; return what it raises. It must not wait for ever."""
    raised: list[BaseException | None] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)
        else:
            raised.append(None)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert raised, "it waits"
    return raised[0]


@pytest.mark.parametrize(("how", "name"), [*product([os.symlink], OURS), *product([os.link], OURS[1:])])
def test_a_file_behind_a_link_stays_as_it_is(name: str, how: Callable[..., None], tmp_path: Path) -> None:
    precious, folder = tmp_path / "precious", tmp_path / "run"
    precious.write_text("precious")
    folder.mkdir()
    how(precious, folder / name)
    try:
        Checkpointer(folder).save(1, model=nn.Linear(1, 1))
    except CheckpointError as error:
        assert name == ".writer" and how is os.symlink and f"Cannot write to {folder}: " in str(error)
    assert precious.read_text() == "precious"


@pytest.mark.parametrize("name", OURS)
def test_no_file_is_made_behind_a_link_that_leads_nowhere(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    os.symlink(tmp_path / "new", folder / name)
    ends(lambda: Checkpointer(folder).save(1, model=nn.Linear(1, 1)))
    assert not (tmp_path / "new").exists()


def test_pieces_go_through_no_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, elsewhere = tmp_path / "pieces", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    os.symlink(tmp_path / "new", folder / "rank-0.failed")
    os.symlink(tmp_path / "new", folder / "rank-0.bin.tmp")

    def fail(file: int) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(CheckpointError, match="the disk is full"):
        write_pieces(folder, 0, [(0, torch.ones(1))])
    shutil.rmtree(folder)
    os.symlink(elsewhere, folder)
    with pytest.raises(CheckpointError, match="is a link"):
        write_pieces(folder, 0, [(0, torch.ones(1))])
    assert not (tmp_path / "new").exists() and not list(elsewhere.iterdir())


def test_the_folder_itself_may_be_a_link(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    os.symlink(scratch, tmp_path / "run")
    model = nn.Linear(1, 1)
    Checkpointer(tmp_path / "run").save(1, model=model)
    assert Checkpointer(tmp_path / "run").load_latest(model=model) == {"step": 1}
    assert (scratch / "step-000000001.pt").exists()
