"""Saving without waiting: what is saved, when it is there, who hears of an error, and how a process ends meanwhile."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import on_ranks
from processes import free_port, launch, platform_env, run
from runs import Halves, files_in, message_of, net, newest_step, run_with
from torch import nn

import ddpkit
from ddpkit.checkpoint.checkpointer import Checkpointer
from ddpkit.checkpoint.files import SummedFile
from ddpkit.errors import CheckpointError, MismatchError

_real_fsync = os.fsync


@contextmanager
def slow_disk() -> Iterator[threading.Event]:
    """Let the disk take nothing for good before the event is set."""
    opened = threading.Event()

    def fsync(file: int) -> None:
        opened.wait(100)
        _real_fsync(file)

    os.fsync = fsync
    try:
        yield opened
    finally:
        opened.set()
        os.fsync = _real_fsync


class Messages(logging.Handler):
    """What the library has logged."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        logging.getLogger("ddpkit").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())

    def close(self) -> None:
        logging.getLogger("ddpkit").removeHandler(self)
        super().close()


def changed_meanwhile(folder: str) -> dict[str, Any]:
    checkpoints, messages = Checkpointer(folder, keep=1), Messages()
    first = checkpoints.save(1, fill=torch.full((10,), 1))
    run = run_with(2)
    weight = next(run["model"].parameters()).detach().clone()
    note = {"numbers": [1, 2], "array": torch.arange(3)}
    with slow_disk() as opened:
        path = checkpoints.save(2, **run, note=note, per_rank={"mine": note["array"]}, wait=False)
        before = files_in(Path(folder)), Path(folder, "latest").read_text(), checkpoints.steps()
        with torch.no_grad():
            for parameter in run["model"].parameters():
                parameter.zero_()
        run["halves"].values[0] = 99
        note["numbers"].append(3)
        note["array"].zero_()
        opened.set()
        checkpoints.wait()
    after = files_in(Path(folder)), Path(folder, "latest").read_text()
    messages.close()
    other = run_with(1)
    rest = checkpoints.load_latest(**other)
    assert torch.equal(next(other["model"].parameters()), weight), "a weight of later was saved"
    assert other["halves"].values == [2, 2] and rest["note"]["numbers"] == [1, 2]
    assert rest["note"]["array"].tolist() == rest["mine"].tolist() == [0, 1, 2]
    checkpoints.wait()  # nothing to wait for
    return {"first": first, "path": path, "before": before, "after": after, "said": messages.texts}


@pytest.mark.parametrize("nprocs", [1, 2, 3])
def test_what_changes_after_the_save_is_not_saved_and_latest_moves_at_the_end(tmp_path: Path, nprocs: int) -> None:
    results = on_ranks(changed_meanwhile, nprocs, str(tmp_path))
    first, path = results[0]["first"].name, results[0]["path"].name
    files, latest, steps = results[0]["before"]
    # the thread may not have begun when rank 0 looks
    assert set(files) - {f"{path}.tmp"} == {"latest", first} and latest == f"{first}\n" and steps == [1]
    for result in results:
        assert result["after"] == (["latest", path], f"{path}\n")
        assert result["path"] == tmp_path / path and result["said"] == []


def save_everything(folder: str) -> list[bytes]:
    torch.manual_seed(0)
    torch.set_num_threads(2)
    history = torch.arange(100.0)
    tied = nn.Linear(50, 50)
    holder = torch.ones(1)
    holder.held = history[:3]
    state = {
        "tied": {"a": tied.weight, "b": tied.weight, "both": [tied.weight, tied.bias]},
        "view": history[-100:],
        "twins": [history[:10], history[:10], history[:0]],
        "sparse": torch.eye(3).to_sparse(),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "conj": torch.ones(2, dtype=torch.complex64).conj(),
        "grad": torch.ones(2, requires_grad=True) * 2,
        "holder": holder,
        "keys": {(1, "a"): {2}, history[:3]: 1},
        "large": torch.randint(256, (1 << 25 | 5,), dtype=torch.uint8),  # copied by several threads
    }
    written = []
    for step, wait in enumerate((True, False, False)):
        path = Checkpointer(folder).save(step, **state, model=net(), wait=wait)
        Checkpointer(folder).wait()
        content = torch.load(path, weights_only=True)
        assert torch.equal(content["state"]["large"], state["large"])
        written.append((sorted(content["state"]), path.stat().st_size))
        twins = content["state"]["twins"]
        twins[0][7] = -1
        assert twins[1][7] == -1, "they share no memory any more"
        content["state"]["tied"]["a"].data.zero_()
        assert not content["state"]["tied"]["b"].any()
        assert content["state"]["holder"].held.tolist() == [0, 1, 2]
        assert content["state"]["sparse"].to_dense().sum() == 3 and content["state"]["grad"].tolist() == [2, 2]
    return written


@pytest.mark.parametrize("nprocs", [1, 2])
def test_the_file_is_the_same_as_that_of_a_save_that_waits(tmp_path: Path, nprocs: int) -> None:
    for written in on_ranks(save_everything, nprocs, str(tmp_path)):
        names, sizes = zip(*written, strict=True)
        assert names[0] == names[1] == names[2]
        assert max(sizes) - min(sizes) < 2000, sizes


def one_after_the_other(folder: str) -> tuple[list[str], list[int], list[str]]:
    checkpoints, messages = Checkpointer(folder, keep=2), Messages()
    with slow_disk() as opened:
        checkpoints.save(1, fill=torch.full((10,), 1), wait=False)
        timer = threading.Timer(0.2, opened.set)
        timer.start()
        checkpoints.save(2, fill=torch.full((10,), 2), wait=False)
        timer.join()
    found = checkpoints.load_latest()
    assert found is not None and found["step"] == 2, "it did not wait for what is being written"
    with slow_disk() as opened:
        timer = threading.Timer(0.1, opened.set)
        timer.start()
        checkpoints.save(3, fill=torch.full((10,), 3), wait=False)
        other = Checkpointer(folder, keep=2).load_latest()  # of another object
        assert other is not None and other["step"] == 3
        timer.join()
    checkpoints.save(4, fill=torch.full((10,), 4))
    messages.close()
    return messages.texts, checkpoints.steps(), files_in(Path(folder))


@pytest.mark.parametrize("nprocs", [1, 2, 3])
def test_a_save_or_load_waits_for_the_one_in_flight(tmp_path: Path, nprocs: int) -> None:
    results = on_ranks(one_after_the_other, nprocs, str(tmp_path))
    for said, steps, files in results:
        assert not said and steps == [3, 4]
        assert files == ["latest", "step-000000003.pt", "step-000000004.pt"]


def fail_later(folder: str) -> dict[str, Any]:
    checkpoints, messages, said = Checkpointer(folder), Messages(), {}
    checkpoints.save(1, fill=torch.full((10,), 1))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for number, raise_it in enumerate((lambda: checkpoints.save(9), checkpoints.wait, checkpoints.load_latest)):
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))  # a disk that is full after 100 kB
        checkpoints.save(2, fill=torch.full((100_000,), 2), wait=False)
        said[number] = message_of(raise_it)
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        checkpoints.wait()  # it is raised once
        assert newest_step(Path(folder)) == 1 and checkpoints.steps() == [1]
    checkpoints.save(3, fill=torch.full((10,), 3), wait=False)
    Path(folder, "latest").unlink(missing_ok=True)
    messages.close()
    return said | {"logged": messages.texts}


@pytest.mark.parametrize("nprocs", [1, 2, 3])
def test_every_rank_hears_of_an_error_at_its_next_call(tmp_path: Path, nprocs: int) -> None:
    results = on_ranks(fail_later, nprocs, str(tmp_path))
    for rank, said in enumerate(results):
        for number in range(3):
            expected = f"Saving step 2 without waiting failed: Cannot write to {tmp_path}: "
            assert said[number].startswith(expected) and "Earlier checkpoints are complete." in said[number], said
        logged = [text for text in said["logged"] if text.startswith("Saving step 2 without waiting failed: ")]
        assert len(logged) == 3 * (rank == 0)


def refused_at_once(folder: str) -> dict[str, str]:
    rank, checkpoints = ddpkit.get_rank(), Checkpointer(folder)
    said = {"numpy": message_of(checkpoints.save, 1, best=np.ones(2), wait=False)}
    if ddpkit.get_world_size() > 1:
        said["differs"] = message_of(checkpoints.save, 1, fill=torch.full((1 << 19,), rank), wait=False)
        said["differs, waiting"] = message_of(checkpoints.save, 1, fill=torch.full((1 << 19,), rank))
        with pytest.raises(MismatchError, match="wait"):
            checkpoints.save(1, wait=rank == 0)
    with pytest.raises(TypeError, match="wait must be True or False, got 1"):
        checkpoints.save(1, wait=1)
    ddpkit.barrier()
    assert files_in(Path(folder)) == []
    checkpoints.wait()
    return said


@pytest.mark.parametrize("nprocs", [1, 2, 3])
def test_what_cannot_be_saved_is_refused_at_once_on_every_rank(tmp_path: Path, nprocs: int) -> None:
    for said in on_ranks(refused_at_once, nprocs, str(tmp_path)):
        assert "Cannot save state.best: " in said.pop("numpy")
        for text in said.values():
            assert text.startswith("Nothing was saved: 1 entries differ between ranks:"), text


def test_two_objects_take_turns_in_one_folder(tmp_path: Path) -> None:
    first, second = Checkpointer(tmp_path), Checkpointer(tmp_path)
    with slow_disk() as opened:
        first.save(1, fill=torch.full((10,), 1), wait=False)
        while not list(tmp_path.glob("step-*.tmp")):
            time.sleep(0.01)
        threading.Timer(0.2, opened.set).start()
        second.save(2, fill=torch.full((10,), 2), wait=False)
    del first, second  # the folder stays locked until the thread has ended
    assert newest_step(tmp_path) == 2
    assert Checkpointer(tmp_path).steps() == [1, 2]


def save_and_end(folder: str, how: str) -> None:
    if how == "group":
        ddpkit.setup()
    checkpoints = Checkpointer(folder)
    checkpoints.save(1, fill=torch.full((3_000_000,), 1), wait=False)
    if how == "group":
        ddpkit.teardown()
    if how == "raise":
        raise ValueError("the loop broke")
    if how == "interrupt":
        raise KeyboardInterrupt


@pytest.mark.parametrize("how", ["end", "group", "raise", "interrupt"])
def test_a_process_ends_when_the_file_is_there(tmp_path: Path, how: str) -> None:
    world_size = 2 if how == "group" else 1
    port = free_port()
    envs: list[dict[str, str]] = [{}]
    if how == "group":
        envs = [platform_env(rank, world_size, port) for rank in range(world_size)]
    ended = run(save_and_end, envs, str(tmp_path), how)
    assert [end.code == 0 for end in ended] == [how in ("end", "group")] * world_size, ended
    assert files_in(tmp_path) == ["latest", "step-000000001.pt"]
    assert newest_step(tmp_path) == 1


@contextmanager
def slow_writes() -> Iterator[threading.Event]:
    """Let each write to a checkpoint take a while; set the event at the first."""
    begun = threading.Event()
    real_write = SummedFile.write

    def write(file: SummedFile, data: bytes | memoryview) -> int:
        begun.set()
        time.sleep(0.05)
        return real_write(file, data)

    SummedFile.write = write  # type: ignore[method-assign]
    try:
        yield begun
    finally:
        SummedFile.write = real_write  # type: ignore[method-assign]


@pytest.mark.parametrize("is_started", [False, True])
@pytest.mark.parametrize("wait", [False, True])
def test_a_save_that_is_interrupted_around_its_start(
    is_started: bool, wait: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpointer(tmp_path)
    state = {f"{i}": torch.full((10,), 2) for i in range(20)}
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        if thread.name == "ddpkit-checkpoint":
            if is_started:
                start(thread)
            raise KeyboardInterrupt
        start(thread)

    with slow_writes(), monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(threading.Thread, "start", interrupted)
        checkpoints.save(1, state=state, wait=wait)
    for tensor in state.values():
        tensor.zero_()
    with contextlib.suppress(CheckpointError):  # of the one before
        checkpoints.wait()
    checkpoints.save(2)
    steps = [1, 2] if is_started and not wait else [2]
    assert checkpoints.steps() == steps
    if 1 in steps:
        assert all(
            bool((tensor == 2).all()) for tensor in checkpoints.load(tmp_path / "step-000000001.pt")["state"].values()
        )


def test_an_interrupted_save_leaves_nothing(tmp_path: Path) -> None:
    checkpoints = Checkpointer(tmp_path)
    checkpoints.save(1, fill=torch.full((10,), 1))
    state = {f"{i}": torch.full((10,), 2) for i in range(20)}

    def interrupt() -> None:
        begun.wait()
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    with slow_writes() as begun:
        threading.Thread(target=interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            checkpoints.save(2, state=state)
        for tensor in state.values():
            tensor.zero_()  # as a notebook may, while the thread comes to its end
        checkpoints.save(3, fill=torch.full((10,), 3))
    assert files_in(tmp_path) == ["latest", "step-000000001.pt", "step-000000003.pt"]


PROGRAM = """
import sys, torch, ddpkit
ddpkit.Checkpointer(sys.argv[1]).save(1, fill=torch.full((3_000_000,), 1), wait=False)
raise SystemExit(5)
"""


def test_so_does_the_interpreter(tmp_path: Path) -> None:
    (ended,) = launch([sys.executable, "-c", PROGRAM, str(tmp_path)])
    assert ended.code == 5 and ended.output == ""
    assert files_in(tmp_path) == ["latest", "step-000000001.pt"] and newest_step(tmp_path) == 1


def lose_a_rank(folder: str, notes: str) -> None:
    context = ddpkit.setup()
    checkpoints = Checkpointer(folder)
    checkpoints.save(1, fill=torch.full((10,), 1))
    if context.rank == 0:
        fsync, main = os.fsync, threading.main_thread()

        def fsync_when_the_main_thread_ends(file: int) -> None:
            while not Path(notes, "rank 0 heard").exists():
                time.sleep(0.01)
            time.sleep(0.5)
            fsync(file)

        os.fsync = fsync_when_the_main_thread_ends
        assert main is threading.current_thread()
    checkpoints.save(2, fill=torch.full((10,), 2), wait=False)
    if context.rank == 1:
        os._exit(3)
    try:
        ddpkit.barrier()
    except ddpkit.PeerError:
        Path(notes, f"rank {context.rank} heard").touch()
        raise


def test_a_rank_that_is_lost_meanwhile_does_not_cost_the_checkpoint(tmp_path: Path) -> None:
    (folder := tmp_path / "folder").mkdir()
    (notes := tmp_path / "notes").mkdir()
    port = free_port()
    ended = run(lose_a_rank, [platform_env(rank, 2, port) for rank in range(2)], str(folder), str(notes))
    assert ended[1].code == 3 and ended[0].code not in (0, None), ended
    assert "PeerError" in ended[0].output
    assert newest_step(folder) == 2, ended[0].output


def leave_with_a_save(folder: str, most: int) -> None:
    with ddpkit.distributed():
        checkpoints = Checkpointer(folder)
        checkpoints.save(1, fill=torch.full((10,), 1))
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
        checkpoints.save(2, fill=torch.full((100_000,), 2), wait=False)
        del checkpoints
    print(f"left with {Checkpointer(folder).steps()}")


@pytest.mark.parametrize("nprocs", [1, 2, 3])
@pytest.mark.parametrize("fails", [False, True])
def test_the_block_ends_with_the_last_save_or_its_error(tmp_path: Path, nprocs: int, fails: bool) -> None:
    (folder := tmp_path / "folder").mkdir()
    port = free_port()
    envs = [platform_env(rank, nprocs, port) for rank in range(nprocs)]
    for end in run(leave_with_a_save, envs, str(folder), 100_000 if fails else 10_000_000):
        if fails:
            assert end.code == 1, end
            assert "CheckpointError: Saving step 2 without waiting failed: Cannot write" in end.output, end.output
        else:
            assert end.code == 0 and "left with [1, 2]" in end.output, end.output
    assert newest_step(folder) == (1 if fails else 2)


def test_a_forked_child_has_nothing_to_wait_for(tmp_path: Path) -> None:
    checkpoints = Checkpointer(tmp_path)
    with slow_disk() as opened:
        checkpoints.save(1, fill=torch.full((10,), 1), wait=False)
        if (child := os.fork()) == 0:
            code = 1
            try:
                checkpoints.wait()
                with pytest.raises(CheckpointError, match="is writing into"):
                    checkpoints.save(2)
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        opened.set()
        checkpoints.wait()
    assert checkpoints.steps() == [1]


def test_a_state_may_be_anything_with_a_state_dict(tmp_path: Path) -> None:
    checkpoints = Checkpointer(tmp_path)
    checkpoints.save(1, holder=Halves(5), wait=False)
    holder = Halves(1)
    checkpoints.load_latest(holder=holder)
    assert holder.values == [5, 5] and holder.average.tolist() == [5, 5]


def delete_the_folder(folder: str, moment: str) -> str:
    """Delete the folder while a checkpoint is being written there, on rank 0."""
    path = Path(folder, "run")
    checkpoints = Checkpointer(path)

    def delete() -> None:
        if ddpkit.get_rank() == 0:
            path.rename(f"{path} deleted")  # at once, while rmtree may meet a file that is just being made

    def delete_in_the_middle(file: SummedFile) -> None:
        delete()
        end(file)

    end = SummedFile.end
    with pytest.MonkeyPatch.context() as patch:
        if moment == "while it is written":
            patch.setattr(SummedFile, "end", delete_in_the_middle)
        with slow_disk():
            checkpoints.save(1, fill=torch.full((100_000,), 1), wait=False)
            if moment == "before it is complete":
                delete()
        return message_of(checkpoints.wait)


@pytest.mark.parametrize("nprocs", [1, 2, 3])
@pytest.mark.parametrize("moment", ["while it is written", "before it is complete"])
def test_a_folder_that_is_deleted_meanwhile_is_named(tmp_path: Path, nprocs: int, moment: str) -> None:
    problem = f"Cannot write to {tmp_path / 'run'}: [Errno 2] No such file or directory"
    for said in on_ranks(delete_the_folder, nprocs, str(tmp_path), moment):
        assert said.startswith(f"Saving step 1 without waiting failed: {problem}")
