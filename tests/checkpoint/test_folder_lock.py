"""Two jobs and one folder: real processes, and files as another machine would have left them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import on_ranks
from processes import begin

from ddpkit.checkpoint.checkpointer import Checkpointer
from ddpkit.errors import CheckpointError

HANG = 400.0  # seconds: longer than a job may take, however loaded the machine is


def save_and_stay(folder: Path, notes: Path, how: str) -> None:
    checkpoints = Checkpointer(folder)
    checkpoints.save(1, who=os.getpid())
    (notes / "saved 1").touch()
    if how == "stay":
        while not (notes / "go on").exists():
            time.sleep(0.02)
        checkpoints.save(2, who=os.getpid())
        (notes / "saved 2").touch()
        time.sleep(HANG)


@dataclass
class Job:
    """Another job, that writes into a folder and notes in another what it has done."""

    process: Any
    notes: Path

    def wait_for(self, note: str) -> None:
        while not (self.notes / note).exists():
            assert self.process.is_alive(), (self.notes / "output").read_text()
            time.sleep(0.02)


@contextmanager
def job(folder: Path, notes: Path, how: str = "stay") -> Iterator[Job]:
    process = begin(save_and_stay, {}, folder, notes, how, output=str(notes / "output"))
    try:
        yield Job(process, notes)
    finally:
        process.kill()
        process.join()


@pytest.fixture
def notes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("notes")


def save(folder: Path, step: int = 9) -> None:
    Checkpointer(folder).save(step, fill=torch.full((3,), step))


def test_the_second_of_two_jobs_is_refused_and_told_of_the_first(tmp_path: Path, notes: Path) -> None:
    with job(tmp_path, notes) as first:
        first.wait_for("saved 1")
        since = rf"process {first.process.pid} on \S+, since \d{{4}}-\d\d-\d\d "
        said = f"{since}.*is writing into .*give each its own folder"
        for _ in range(2):
            with pytest.raises(CheckpointError, match=said):
                save(tmp_path)
        assert Checkpointer(tmp_path).load_latest()["step"] == 1, "reading is for everybody"
        (notes / "go on").touch()
        first.wait_for("saved 2")
        first.process.kill()
        first.process.join()
        save(tmp_path)  # killed, and gone
    assert Checkpointer(tmp_path).steps() == [1, 2, 9]


def refused(folder: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        save(Path(folder))
    return str(caught.value)


@pytest.mark.parametrize("nprocs", [2, 3])
def test_every_rank_of_the_second_job_is_refused(tmp_path: Path, notes: Path, nprocs: int) -> None:
    with job(tmp_path, notes) as first:
        first.wait_for("saved 1")
        said = on_ranks(refused, nprocs, str(tmp_path))
        assert len(set(said)) == 1 and f"process {first.process.pid} " in said[0]


def test_a_job_that_has_ended_holds_nothing(tmp_path: Path, notes: Path) -> None:
    with job(tmp_path, notes, "end") as first:
        first.process.join(HANG)
        assert first.process.exitcode == 0
        save(tmp_path)
    assert sorted(os.listdir(tmp_path)) == [".writer", "latest", "step-000000001.pt", "step-000000009.pt"]


def test_a_process_may_use_its_folder_several_times(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    first, second = Checkpointer(tmp_path), Checkpointer(tmp_path / "link")
    for step, checkpoints in enumerate((first, second, first)):
        checkpoints.save(step)
    del first
    second.save(3)
    open_files = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    for step in range(20):
        save(tmp_path / f"{step}", step)
    if open_files:
        assert len(os.listdir("/proc/self/fd")) <= open_files + 1


def save_by_two_rules(folder: str) -> tuple[str, list[int]]:
    first = Checkpointer(folder, keep=3)
    for step in range(2):
        first.save(step)
    with pytest.raises(CheckpointError) as caught:
        Checkpointer(folder, keep=1).save(2)
    Checkpointer(folder, keep=1).load_latest()  # reading is for everybody
    first.save(2)
    Checkpointer(folder, keep=3).save(3)
    steps = first.steps()
    del first
    again = Checkpointer(folder, keep=1)  # the next run may keep as many as it likes
    again.save(4)
    assert again.steps() == [4]
    return str(caught.value), steps


@pytest.mark.parametrize("nprocs", [1, 2, 3])
def test_a_second_one_that_would_delete_what_the_first_keeps_is_refused(tmp_path: Path, nprocs: int) -> None:
    for said, steps in on_ranks(save_by_two_rules, nprocs, str(tmp_path)):
        assert "keep=3) also saves here, and keeps other checkpoints than Checkpointer(" in said
        assert "keep=1): each would delete the other's. Give each its own folder." in said
        assert steps == [1, 2, 3]


UNREADABLE = ["", "{", "process 1 on elsewhere, since 2024-01-01 00:00:00", "\0" * 50, "[" * 9999]


@pytest.mark.parametrize("text", UNREADABLE)
def test_a_text_that_was_left_holds_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / ".writer").write_text(text)
    save(tmp_path)
    assert (tmp_path / ".writer").read_text().startswith(f"process {os.getpid()} on ")


def test_a_folder_that_another_machine_took_over_is_noticed(tmp_path: Path) -> None:
    checkpoints = Checkpointer(tmp_path)
    checkpoints.save(1)
    (tmp_path / ".writer").write_text(
        "process 1 on elsewhere, since 2024-01-01 00:00:00"
    )  # where locks end at the machine
    with pytest.raises(CheckpointError, match="elsewhere, since 2024-01-01 00:00:00.* has begun to write into"):
        checkpoints.save(2)
    assert checkpoints.steps() == [1]
