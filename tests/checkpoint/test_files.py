"""Files that writers were killed over, that were cut or changed, or that hold code."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runs import (
    net,
    newest_step,
    save_one,
)

import ddpkit
from ddpkit.checkpoint.checkpointer import Checkpointer
from ddpkit.checkpoint.files import dump
from ddpkit.errors import CheckpointError


def save_forever(folder: str, wait: bool, step: int, pipe: int) -> None:
    try:
        checkpoints = Checkpointer(folder)
        while True:
            step += 1
            checkpoints.save(step, fill=torch.full((100_000,), step), wait=wait)
            complete = step if wait else step - 1  # else this one could not begin
            os.write(pipe, f"{complete} ".encode())
    finally:
        os._exit(1)


def kill_fifty_writers(folder: str, wait: bool) -> int:
    torch.set_num_threads(1)  # a process with OpenMP threads must not fork
    rng, last, caught = random.Random(0), 0, 0
    for _ in range(50):
        ours, theirs = os.pipe()
        if (writer := os.fork()) == 0:
            save_forever(folder, wait, last, theirs)
        os.close(theirs)
        os.read(ours, 10)
        time.sleep(rng.uniform(0, 0.03))
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)
        told = [int(text) for text in os.read(ours, 100_000).split()]
        os.close(ours)
        newest = newest_step(Path(folder)) or 0
        assert newest >= max([last, *told])
        last = newest
        caught += bool(list(Path(folder).glob("*.tmp")))
    return caught


@pytest.mark.storm
@pytest.mark.parametrize("wait", [True, False])
def test_fifty_sigkills_leave_the_last_complete_checkpoint(tmp_path: Path, wait: bool) -> None:
    caught = ddpkit.spawn(kill_fifty_writers, 1, str(tmp_path), wait)
    assert caught[0], "no writer was killed while it wrote: this test showed nothing"


def test_a_truncated_checkpoint_is_refused_and_the_one_before_it_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_one(tmp_path, 1)
    path = save_one(tmp_path, 2)
    whole = path.read_bytes()
    for size in (0, 1, 100, len(whole) // 2, len(whole) - 80, len(whole) - 73, len(whole) - 1):
        path.write_bytes(whole[:size])
        caplog.clear()
        assert newest_step(tmp_path) == 1
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert f"Cannot read {path}: its checksum is missing: it was truncated" in caplog.text
        assert path.read_bytes() == whole[:size]
    path.write_bytes(whole)
    assert newest_step(tmp_path) == 2


def test_any_changed_byte_is_noticed(tmp_path: Path) -> None:
    path = save_one(tmp_path, 1, fill=torch.full((10,), 1))
    whole = path.read_bytes()
    for position in {*range(0, len(whole), 97), *range(len(whole) - 75, len(whole))}:
        flipped = bytearray(whole)
        flipped[position] ^= 1 << position % 8
        path.write_bytes(flipped)
        with pytest.raises(CheckpointError, match=r"its checksum (does not match|is missing)"):
            Checkpointer(tmp_path).load(path)


class Bomb:
    def __init__(self, crater: Path) -> None:
        self.crater = crater

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.crater),)


def test_pickled_code_is_refused_with_the_reason(tmp_path: Path) -> None:
    crater, content = tmp_path / "crater", {"format": 1, "step": 2, "state": {}, "kinds": {}, "rng": []}
    content["state"] = {"model": {"weight": Bomb(crater)}}
    path = tmp_path / "step-000000002.pt"
    with open(path, "wb") as file:
        dump(content, file)
    with pytest.raises(CheckpointError, match=r"Cannot read .*2\.pt: .*nsupported.*mkdir"):
        Checkpointer(tmp_path).load_latest()
    torch.save(content, path)
    with pytest.raises(CheckpointError, match="a Checkpointer did not write it"):
        Checkpointer(tmp_path).load(path)
    with pytest.raises(CheckpointError, match=r"Cannot save state\.stats\.extra: .*mkdir.* Save numbers"):
        save_one(tmp_path, 3, stats={"mean": 1.0, "extra": Bomb(crater)})
    with pytest.raises(CheckpointError, match=r"Cannot save state\.best: .*numpy.*"):
        save_one(tmp_path, 3, model=net(), best=np.ones(2))
    assert not crater.exists() and os.listdir(tmp_path) == [path.name]
