"""Who can write to the folder of checkpoints has put other things there than files."""

from __future__ import annotations

import os
import re
import shutil
import threading
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
from conftest import on_ranks
from runs import message_of
from torch import nn

import ddpkit
from ddpkit.checkpoint.checkpointer import Checkpointer
from ddpkit.checkpoint.files import dump
from ddpkit.checkpoint.sharded import write_pieces
from ddpkit.errors import CheckpointError

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


@pytest.mark.parametrize(("how", "name"), list(product([os.symlink, os.link], OURS)))
def test_a_file_behind_a_link_stays_as_it_is(name: str, how: Callable[..., None], tmp_path: Path) -> None:
    precious, folder = tmp_path / "precious", tmp_path / "run"
    precious.write_text("precious")
    folder.mkdir()
    how(precious, folder / name)
    try:
        Checkpointer(folder).save(1, model=nn.Linear(1, 1))
    except CheckpointError as error:
        assert name in (".writer", "latest") and f"{folder / name}'" in str(error)
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


def make_endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def make_sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 20 << 30)


STRANGE = {  # what a file may be instead, and what is said of it
    os.mkfifo: "It is not a regular file",
    make_endless: "It is a link",
    os.mkdir: "It is not a regular file",
    make_sparse: "more than 16777216 bytes|checksum is missing",
}


def uses_with(folder: Path) -> list[str]:
    """Use a folder in which `latest` is none; return what is said."""
    checkpoints = Checkpointer(folder)
    calls: list[Callable[[], object]] = [
        checkpoints.load_latest,
        checkpoints.load_best,
        lambda: checkpoints.save(1, model=nn.Linear(1, 1)),
    ]
    return [message_of(call) for call in calls]


@pytest.mark.parametrize("nprocs", [1, 2, 3])
@pytest.mark.parametrize("make", STRANGE)
def test_a_list_that_is_no_list_is_neither_waited_for_nor_read(
    make: Callable[[Path], None], nprocs: int, tmp_path: Path
) -> None:
    make(tmp_path / "latest")
    for latest, best, saved in on_ranks(uses_with, nprocs, tmp_path, timeout=20.0):
        assert latest == best
        assert re.match(
            rf"(Rank 0: )?Cannot read the list of .*({STRANGE[make]}): '{tmp_path}/latest'. Delete it", latest
        )
        assert re.match(rf"(Rank 0: )?Saved .*, which is complete, but cannot list it in .*({STRANGE[make]})", saved)
    with pytest.raises(CheckpointError, match=STRANGE[make]):
        Checkpointer(tmp_path).steps()


@pytest.mark.parametrize("make", STRANGE)
def test_a_checkpoint_that_is_none_is_neither_waited_for_nor_read(make: Callable[[Path], None], tmp_path: Path) -> None:
    good = Checkpointer(tmp_path).save(1, model=nn.Linear(1, 1))
    for path in (tmp_path / "step-000000002.pt", tmp_path / "mine.pt"):
        make(path)
        error = ends(lambda path=path: Checkpointer(tmp_path).load(path))
        assert isinstance(error, CheckpointError) and re.search("regular file|checksum is missing", str(error))
    assert ends(lambda: Checkpointer(tmp_path).load_latest(model=nn.Linear(1, 1))) is None
    os.symlink(good, tmp_path / "best.pt")
    assert Checkpointer(tmp_path).load(tmp_path / "best.pt")["step"] == 1, "a path may be a link"
    os.symlink(tmp_path / "mine.pt", tmp_path / "step-000000003.pt")
    assert Checkpointer(tmp_path).load_latest()["step"] == 1, "a name in the folder may not"


def test_a_link_in_the_folder_is_no_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    good = Checkpointer(tmp_path / "other").save(2, model=nn.Linear(1, 1))
    Checkpointer(tmp_path).save(1, model=nn.Linear(1, 1))
    os.symlink(good, tmp_path / "step-000000002.pt")
    assert Checkpointer(tmp_path).load_latest()["step"] == 1 and not caplog.records
    (tmp_path / "latest").write_text("step-000000002.pt\n")
    assert Checkpointer(tmp_path).load_latest()["step"] == 1


@pytest.mark.parametrize("make", [os.mkfifo, make_endless, os.mkdir])
def test_a_lock_that_is_no_file_is_an_error(make: Callable[[Path], None], tmp_path: Path) -> None:
    make(tmp_path / ".writer")
    error = ends(lambda: Checkpointer(tmp_path).save(1, model=nn.Linear(1, 1)))
    assert isinstance(error, CheckpointError) and f"Cannot write to {tmp_path}: " in str(error)
    assert os.listdir(tmp_path) == [".writer"]


@pytest.mark.parametrize("name", ["format", "step", "state", "described", "rng"])
@pytest.mark.parametrize("value", [None, "1", [1]])
def test_a_file_without_a_part_is_refused_before_anything_is_loaded(name: str, value: object, tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    path = Checkpointer(tmp_path).save(1, model=model)
    content = torch.load(path)
    content[name] = value
    if value is None:
        del content[name]
    with open(path, "wb") as file:
        dump(content, file)
    other = nn.Linear(1, 1)
    before = [parameter.clone() for parameter in other.parameters()]
    for load in (Checkpointer(tmp_path).load_latest, partial(Checkpointer(tmp_path).load, path)):
        for objects in ({}, {"model": other}):
            with pytest.raises(CheckpointError, match=f"Cannot read {path}: its {name}|no valid '{name}'"):
                load(**objects)
    assert all(map(torch.equal, before, other.parameters()))


def test_the_library_opens_files_of_a_folder_in_one_way() -> None:
    opening = re.compile(r"(?<![\w.])open\(|os\.open\(|\.(read|write)_(text|bytes)\(|\.open\(")
    package = Path(ddpkit.__file__).parent
    found = []
    for file in (package / "checkpoint").glob("*.py"):
        found += [line.strip() for line in file.read_text().splitlines() if opening.search(line)]
    assert found == [
        "return open(path, mode, opener=_open_regular)",
        "descriptor = os.open(path, flags, 0o666)",
        "folder = os.open(path.parent, os.O_RDONLY)",
    ]
