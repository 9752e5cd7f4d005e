"""Loading beside a writer, from broken files, and into objects that do not fit."""

from __future__ import annotations

import functools
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import on_ranks
from runs import (
    Counter,
    files_in,
    flat,
    net,
    save_one,
)
from torch import nn

import ddpkit
from ddpkit.checkpoint.checkpointer import Checkpointer
from ddpkit.checkpoint.files import dump, write_durably
from ddpkit.checkpoint.folder import list_and_prune
from ddpkit.data.seeds import get_rng_state
from ddpkit.errors import CheckpointError
from ddpkit.launch import ranks


def test_if_all_are_broken_each_is_listed_with_its_reason(tmp_path: Path) -> None:
    save_one(tmp_path, 1).write_bytes(b"")
    save_one(tmp_path, 2)
    (path := save_one(tmp_path, 3)).write_bytes(path.read_bytes().replace(b"checksum:", b"checksum:0"))
    os.truncate(tmp_path / "step-000000002.pt", 500)
    with pytest.raises(
        CheckpointError, match=r"No checkpoint in .*\n  .*3\.pt: its.*\n  .*2\.pt: its.*\n  .*1\.pt: its"
    ):
        Checkpointer(tmp_path).load_latest()
    assert len(files_in(tmp_path)) == 4


def read_beside_a_writer(folder: str, reads: int) -> None:
    """Rank 0 and the others read while a process of its own saves and deletes as fast as it can."""
    torch.set_num_threads(1)  # a process with OpenMP threads must not fork
    writer = 0
    if ddpkit.get_rank() == 0:
        ours, theirs = os.pipe()
        if (writer := os.fork()) == 0:
            ranks.set_launch(None)
            write_alone(folder, theirs)
        os.close(theirs)  # else a writer that dies would be waited for
        os.read(ours, 1)
    ddpkit.barrier()
    last = 0
    try:
        for _ in range(reads):
            loaded = Checkpointer(folder).load_latest()
            assert loaded is not None and loaded["step"] >= last
            last = loaded["step"]
    finally:
        if writer:
            os.kill(writer, signal.SIGKILL)
            os.waitpid(writer, 0)


def write_alone(folder: str, pipe: int) -> None:
    try:
        for step in range(1, 10**9):
            content = {"format": 1, "step": step, "score": None, "state": {}, "described": {}, "rng": [get_rng_state()]}
            path = Path(folder, f"step-{step:09d}.pt")
            write_durably(path, functools.partial(dump, content))
            list_and_prune(path, None, keep=1, keep_best=0)
            os.write(pipe, b"." if step == 1 else b"")
    finally:
        os._exit(1)


@pytest.mark.parametrize("nprocs", [1, 2])
def test_a_reader_beside_a_writer_always_finds_one(tmp_path: Path, nprocs: int) -> None:
    on_ranks(read_beside_a_writer, nprocs, str(tmp_path), 40)


def load_what_does_not_fit(folder: str) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpoints = Checkpointer(folder)
    checkpoints.save(1, model=model, optimizer=optimizer, good=Counter(3), bad=Counter(13))
    wide, deep = net(5), nn.Sequential(*net(), nn.Linear(1, 1))
    del deep[1]
    same = net()
    fit_optimizer = torch.optim.SGD(same.parameters(), lr=0.5)
    counter = Counter(0)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"model": wide}, r"model has 0\.weight of shape \(3, 4\) in the checkpoint, \(5, 4\) here"),
        ({"model": deep}, r"model has 1\.running_mean in the checkpoint, not here"),
        ({"model": nn.Sequential(*net(), nn.Linear(1, 1))}, r"model has 3\.weight here, not in the checkpoint"),
        ({"optimizer": torch.optim.Adam(same.parameters())}, "optimizer is SGD in the checkpoint, Adam here"),
        (
            {"optimizer": torch.optim.SGD([same[0].weight])},
            r"optimizer has groups of \[6\] tensors in the checkpoint, of \[1\] here",
        ),
        ({"ema": same}, "it has no 'ema'; it has: model, optimizer, good, bad"),
    ]
    for wrong, message in cases:
        fit = {"model": same, "optimizer": fit_optimizer, "good": counter} | wrong
        before = [flat(fit["model"]), str(fit["optimizer"].state_dict()), torch.get_rng_state().tolist()]
        with pytest.raises(CheckpointError, match=message):
            checkpoints.load_latest(**fit)
        assert before == [flat(fit["model"]), str(fit["optimizer"].state_dict()), torch.get_rng_state().tolist()]
        assert counter.counts == [0]
    with pytest.raises(CheckpointError, match="ValueError: thirteen\nThe objects are in an undefined state"):
        checkpoints.load_latest(model=same, bad=Counter(0))
    with pytest.raises(TypeError, match="note='x' has no load_state_dict"):
        checkpoints.load_latest(note="x")
    assert checkpoints.load_latest(model=same, optimizer=fit_optimizer, good=counter)["step"] == 1
    assert flat(same) == flat(model) and counter.counts == [3] and fit_optimizer.param_groups[0]["lr"] == 0.1


def test_what_does_not_fit_changes_nothing_and_is_named(tmp_path: Path) -> None:
    on_ranks(load_what_does_not_fit, 1, str(tmp_path))


def test_learning_rates_of_another_global_batch_are_kept_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def optimizer_of(world_size: int, apply: bool = True) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
        if apply:
            ddpkit.ScalePlan(64, 0.1, world_size, rule="linear").apply(optimizer)
        return optimizer

    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, optimizer=optimizer_of(8))
    for same in (optimizer_of(8), optimizer_of(2, apply=False)):
        checkpointer.load_latest(optimizer=same)
        assert same.param_groups[0]["lr"] == pytest.approx(0.8) and not caplog.messages
    other = optimizer_of(2)
    checkpointer.load_latest(optimizer=other)
    assert other.param_groups[0]["lr"] == pytest.approx(0.8)
    (said,) = caplog.messages
    assert "rates of optimizer were scaled by 8 when saved, and by 2 here" in said and "by 0.25." in said
