"""The holder of a lock whose process has ended, or has lost it: files as it would have left them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from runs import save_one

from ddpkit.checkpoint.checkpointer import Checkpointer
from ddpkit.errors import CheckpointError
from ddpkit.launch.process_tree import born


def test_a_dead_process_on_this_machine_holds_nothing_though_its_number_is_used_again(tmp_path: Path) -> None:
    checkpoints = Checkpointer(tmp_path)
    checkpoints.save(1)
    holder = json.loads((tmp_path / ".writer").read_text())
    del checkpoints
    assert holder["pid"] == os.getpid()
    (tmp_path / ".writer").write_text(json.dumps(holder | {"token": "00", "host": "a container"}))
    save_one(tmp_path, 9)


@contextmanager
def another_process() -> Iterator[int]:
    process = subprocess.Popen(["sleep", "600"])
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()


def leave_lock(folder: Path, pid: int, **changed: Any) -> None:
    """Leave the file of a process of this machine that has lost its lock."""
    checkpoints = Checkpointer(folder)
    checkpoints.save(1)
    mine = json.loads((folder / ".writer").read_text())
    del checkpoints
    (folder / ".writer").write_text(json.dumps(mine | {"token": "00", "pid": pid} | changed))


def test_a_process_that_has_the_number_of_a_dead_one_holds_nothing(tmp_path: Path) -> None:
    with another_process() as pid:
        leave_lock(tmp_path, pid, born="1")
        save_one(tmp_path, 9)


@pytest.mark.parametrize("known", [True, False])  # an older ddpkit did not note when a process had started
def test_a_process_that_lost_its_lock_holds_the_folder_while_it_runs(tmp_path: Path, known: bool) -> None:
    with another_process() as pid:
        leave_lock(tmp_path, pid, born=born(pid) if known else "")
        with pytest.raises(CheckpointError, match=f"process {pid} on "):
            save_one(tmp_path, 9)
    save_one(tmp_path, 9)


def test_a_holder_that_was_killed_and_not_yet_waited_for_holds_nothing(tmp_path: Path) -> None:
    with another_process() as pid:
        leave_lock(tmp_path, pid, born=born(pid))
        os.kill(pid, signal.SIGKILL)
        while born(pid):
            time.sleep(0.01)
        save_one(tmp_path, 9)
