from __future__ import annotations

import copy
import logging
import os
import random
import re
import resource
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import on_ranks, same
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import ddpkit
from ddpkit.checkpoint import checkpointer, states
from ddpkit.checkpoint.checkpointer import Checkpointer
from ddpkit.checkpoint.files import dump
from ddpkit.errors import CheckpointError, DdpkitError
from ddpkit.launch import ranks
from ddpkit.parallel.wrap import wrap_model
from ddpkit.seeding.generator_states import get_rng_state
from ddpkit.seeding.seeds import seed_everything


def net(width: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, 1))


def make_run() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    model = wrap_model(net())
    # the bias before the BatchNorm has a gradient of rounding errors only; a small eps would make steps of them
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, eps=1e-3)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
    model(torch.rand(5, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()


def draw() -> list[float]:
    return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(()).item()]


def flat(model: nn.Module) -> list[float]:
    return torch.cat([tensor.double().flatten() for tensor in model.state_dict().values()]).tolist()


def save_one(folder: Path, step: int = 1, **state: Any) -> Path:
    torch.manual_seed(step)
    return Checkpointer(folder).save(step, **(state or {"model": net(), "fill": torch.full((1000,), step)}))


def newest_step(folder: Path) -> int | None:
    loaded = Checkpointer(folder).load_latest()
    assert loaded is None or bool((loaded["fill"] == loaded["step"]).all())
    return loaded and loaded["step"]


# Round trips


def interrupted_and_resumed(folder: str) -> tuple[list[Any], list[Any], Any]:
    def go_on() -> list[Any]:
        drawn = draw()
        train(model, optimizer, scheduler)
        return [drawn, flat(model), scheduler.get_last_lr()]

    checkpoints = Checkpointer(folder)
    assert checkpoints.load_latest() is None
    model, optimizer, scheduler = make_run()
    seed_everything(0, per_rank=True)
    train(model, optimizer, scheduler)
    random.gauss(0, 1)  # leaves the other half of a pair in the generator
    np.random.randn()
    note = {"best": 0.5, "names": ["a", "b"], "at": (1, None, True), "tensor": torch.arange(3)}
    path = checkpoints.save(7, model=model, optimizer=optimizer, scheduler=scheduler, note=note)
    saved = copy.deepcopy([[*model.parameters()], optimizer.state_dict()])
    uninterrupted = go_on()

    model, optimizer, scheduler = make_run()
    rest = checkpoints.load_latest(model=model, optimizer=optimizer, scheduler=scheduler)
    assert same([[*model.parameters()], optimizer.state_dict()], saved)
    resumed = go_on()
    before = draw(), torch.get_rng_state()
    whole = checkpoints.load(path)
    assert torch.equal(before[1], torch.get_rng_state()), "reading without objects touched the generators"
    assert rest["note"]["tensor"].tolist() == whole["note"]["tensor"].tolist() == [0, 1, 2]
    assert whole["model"].keys() == net().state_dict().keys()
    del rest["note"]["tensor"]
    return uninterrupted, resumed, rest


@pytest.mark.parametrize("nprocs", [1, 2, 3])
def test_a_resumed_run_continues_as_if_it_had_not_stopped(tmp_path: Path, nprocs: int) -> None:
    results = on_ranks(interrupted_and_resumed, nprocs, str(tmp_path))
    for (drawn, weights, rates), (drawn_again, resumed, rates_again), rest in results:
        assert (drawn_again, rates_again) == (drawn, rates)
        if nprocs < 3:
            assert resumed == weights
        # DDP's first backward and its later ones add three ranks in another order: 2**-22 of a gradient of about 1,
        # times the rate of 0.05, divided by Adam's eps
        assert resumed == pytest.approx(weights, rel=0, abs=2e-5)
        assert rest == {"step": 7, "note": {"best": 0.5, "names": ["a", "b"], "at": (1, None, True)}}
    drawn = [tuple(resumed[0]) for _, resumed, _ in results]
    assert len(set(drawn)) == nprocs, "every rank has its own generators"
    assert sorted(os.listdir(tmp_path)) == ["latest", "step-000000007.pt"]


def save_plain(folder: str) -> None:
    seed_everything(0)
    model = net()
    seed_everything(0, per_rank=True)
    Checkpointer(folder).save(7, model=model)


def load_and_draw(folder: str) -> tuple[list[float], list[float], list[str]]:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ddpkit").addHandler(handler)
    model, draws = net(), []
    for _ in range(2):
        Checkpointer(folder).load_latest(model=model)
        draws.append(draw())
    assert draws[0] == draws[1]
    return flat(model), draws[0], messages


def test_another_number_of_ranks_gets_the_state_and_new_random_numbers(tmp_path: Path) -> None:
    on_ranks(save_plain, 2, str(tmp_path))
    saved = Checkpointer(tmp_path).load_latest()["model"]
    expected = torch.cat([tensor.double().flatten() for tensor in saved.values()]).tolist()
    seen = []
    for nprocs in (1, 3):
        results = on_ranks(load_and_draw, nprocs, str(tmp_path))
        assert all(model == expected for model, _, _ in results)
        seen += [tuple(drawn) for _, drawn, _ in results]
        assert f"Saved on 2 ranks (cpu), loaded on {nprocs} (cpu)" in results[0][2][0]
        assert not any(messages for _, _, messages in results[1:])
    assert len(set(seen)) == 3  # rank 0 draws the same on 1 and on 3
    _, _, messages = on_ranks(load_and_draw, 2, str(tmp_path))[0]
    assert messages == []


def saves_wrapped(folder: str) -> list[str]:
    torch.manual_seed(0)
    model = wrap_model(net())
    assert isinstance(model, nn.parallel.DistributedDataParallel)
    Checkpointer(folder).save(1, model=model, raw=model.state_dict())
    other = wrap_model(net(), "ddp")
    Checkpointer(folder).load_latest(model=other)
    assert flat(other) == flat(model)
    return list(torch.load(Path(folder, "step-000000001.pt"), weights_only=True)["state"]["model"])


def load_each_other(folder: str) -> None:
    def compiled(model: nn.Module) -> nn.Module:
        return torch.compile(model, backend="eager")  # type: ignore[return-value]  # the default takes long to import

    inner = net()
    inner[0], inner[2] = compiled(inner[0]), nn.DataParallel(inner[2])
    checkpoints = Checkpointer(folder)
    for model in (net(), compiled(net()), nn.DataParallel(net()), compiled(nn.DataParallel(net())), inner):
        last = checkpoints.load_latest(model=model)  # written by DDP first, then by the kind before this one
        saved = checkpoints.load_latest()
        assert (
            last
            and saved
            and flat(model) == torch.cat([t.double().flatten() for t in saved["model"].values()]).tolist()
        )
        nn.init.normal_(next(model.parameters()))
        checkpoints.save(last["step"] + 1, model=model, raw=model.state_dict())
        plain, from_raw = net(), net()
        checkpoints.load_latest(model=plain, raw=from_raw)
        assert flat(plain) == flat(from_raw) == flat(model)


def test_wrapped_plain_and_compiled_models_load_each_others_checkpoints(tmp_path: Path) -> None:
    assert on_ranks(saves_wrapped, 2, str(tmp_path))[0] == list(net().state_dict())
    on_ranks(load_each_other, 1, str(tmp_path))


# What is on the disk


def files_in(folder: Path) -> list[str]:
    return sorted(name for name in os.listdir(folder) if name != ".writer")


def test_only_the_last_written_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpointer(tmp_path / "deep" / "run", keep=2)
    for step in (100, 200, 300, 150):  # back to 200, and on from there
        checkpoints.save(step, fill=torch.full((10,), step))
    assert files_in(checkpoints.folder) == ["latest", "step-000000150.pt", "step-000000300.pt"]
    assert (checkpoints.folder / "latest").read_text() == "step-000000150.pt\nstep-000000300.pt\n"
    assert newest_step(checkpoints.folder) == 150
    (checkpoints.folder / "latest").rename(tmp_path / "latest")
    assert newest_step(checkpoints.folder) == 300


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


def save_where_latest_cannot_be_written(folder: str) -> tuple[str, list[int]]:
    checkpoints = Checkpointer(folder, keep=1, keep_best=1)
    said = message_of(checkpoints.save, 2, score=2.0, fill=torch.full((10,), 2))
    return said, checkpoints.steps()


@pytest.mark.parametrize("nprocs", [1, 2, 3])
def test_a_checkpoint_that_cannot_be_listed_is_said_to_be_complete(tmp_path: Path, nprocs: int) -> None:
    Checkpointer(tmp_path).save(1, score=1.0, fill=torch.full((10,), 1))
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").mkdir()
    for said, steps in on_ranks(save_where_latest_cannot_be_written, nprocs, str(tmp_path)):
        path = re.escape(str(tmp_path / "step-000000002.pt"))
        assert re.match(rf"Saved {path}, which is complete, but cannot list it in .*latest: ", said), said
        assert "load(path) takes this one. No older one was deleted." in said and steps == [1, 2]
    assert Checkpointer(tmp_path).load(tmp_path / "step-000000002.pt")["step"] == 2
    assert newest_step(tmp_path) == 2


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
    assert "Saved" in caplog.text and "step-000000002.pt, but an old checkpoint stays: " in caplog.text
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


def test_it_says_what_it_is(tmp_path: Path) -> None:
    assert repr(Checkpointer("runs/a")) == "Checkpointer('runs/a', keep=3)"
    assert repr(Checkpointer("runs/a", keep=np.int64(1), keep_best=2)) == "Checkpointer('runs/a', keep=1, keep_best=2)"


def test_numbers_of_numpy_and_torch_are_numbers(tmp_path: Path) -> None:
    checkpoints = Checkpointer(tmp_path, keep=np.int32(2))
    for step in (np.int64(1), np.uint8(2), torch.tensor(3)):
        checkpoints.save(step, fill=torch.full((1,), int(step)))
    assert checkpoints.steps() == [2, 3] and checkpoints.load_latest()["step"] == 3


def test_foreign_files_stay_and_leftovers_of_a_killed_writer_go(tmp_path: Path) -> None:
    save_one(tmp_path)
    for name in ("step-000000002.pt.tmp", "latest.tmp", "notes.txt", "model.pt"):
        (tmp_path / name).write_bytes(b"half")
    assert newest_step(tmp_path) == 1
    save_one(tmp_path, 3)
    assert sorted(os.listdir(tmp_path)) == ["latest", "model.pt", "notes.txt", "step-000000001.pt", "step-000000003.pt"]


def save_forever(folder: str, step: int, pipe: int) -> None:
    try:
        while True:
            step += 1
            Checkpointer(folder).save(step, fill=torch.full((100_000,), step))
            os.write(pipe, f"{step} ".encode())
    finally:
        os._exit(1)


def kill_fifty_writers(folder: str) -> int:
    torch.set_num_threads(1)  # a process with OpenMP threads must not fork
    rng, last, caught = random.Random(0), 0, 0
    for _ in range(50):
        ours, theirs = os.pipe()
        if (writer := os.fork()) == 0:
            save_forever(folder, last, theirs)
        os.close(theirs)
        told = int(os.read(ours, 10).split()[0])
        time.sleep(rng.uniform(0, 0.03))
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)
        os.close(ours)
        last = newest_step(Path(folder)) or 0
        assert last >= told
        caught += bool(list(Path(folder).glob("*.tmp")))
    return caught


def test_fifty_sigkills_leave_a_complete_checkpoint(tmp_path: Path) -> None:
    caught = ddpkit.spawn(kill_fifty_writers, 1, str(tmp_path))
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


def test_if_all_are_broken_each_is_listed_with_its_reason(tmp_path: Path) -> None:
    save_one(tmp_path, 1).write_bytes(b"")
    save_one(tmp_path, 2)
    (path := save_one(tmp_path, 3)).write_bytes(path.read_bytes().replace(b"sha256:", b"sha256:0"))
    os.truncate(tmp_path / "step-000000002.pt", 500)
    with pytest.raises(
        CheckpointError, match=r"No checkpoint in .*\n  .*3\.pt: its.*\n  .*2\.pt: its.*\n  .*1\.pt: its"
    ):
        Checkpointer(tmp_path).load_latest()
    assert len(os.listdir(tmp_path)) == 4


def read_beside_a_writer(folder: str, seconds: float) -> int:
    """Rank 0 and the others read while a process of its own saves and deletes as fast as it can."""
    torch.set_num_threads(1)  # a process with OpenMP threads must not fork
    writer = 0
    if ddpkit.get_rank() == 0:
        ours, theirs = os.pipe()
        if (writer := os.fork()) == 0:
            ranks.set_launch(None)
            write_alone(folder, theirs)
        os.read(ours, 1)
    ddpkit.barrier()
    last, reads = 0, 0
    end = time.monotonic() + seconds
    try:
        while not ddpkit.stop_together(time.monotonic() > end):
            loaded = Checkpointer(folder).load_latest()
            assert loaded is not None and loaded["step"] >= last
            last, reads = loaded["step"], reads + 1
    finally:
        if writer:
            os.kill(writer, signal.SIGKILL)
            os.waitpid(writer, 0)
    return reads


def write_alone(folder: str, pipe: int) -> None:
    try:
        checkpoints = Checkpointer(folder, keep=1)
        for step in range(1, 10**9):
            content = {"format": 1, "step": step, "score": None, "kinds": {}, "shapes": {}, "rng": [get_rng_state()]}
            checkpoints._write(Path(folder, f"step-{step:09d}.pt"), None, content | {"state": {}})
            os.write(pipe, b"." if step == 1 else b"")
    finally:
        os._exit(1)


@pytest.mark.parametrize("nprocs", [1, 2])
def test_a_reader_beside_a_writer_always_finds_one(tmp_path: Path, nprocs: int) -> None:
    reads = on_ranks(read_beside_a_writer, nprocs, str(tmp_path), 3.0)
    assert reads[0] >= 10


def test_a_list_that_changes_while_it_is_read_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder := tmp_path / "here").mkdir()
    Checkpointer(folder, keep=1).save(1)
    next_one = Checkpointer(tmp_path / "elsewhere").save(3)

    def write_meanwhile(here: Path, name: str) -> bool:
        monkeypatch.undo()
        Checkpointer(folder, keep=1).save(2)
        shutil.copy(next_one, folder)  # as between writing and listing it
        return checkpointer._is_checkpoint(here, name)

    monkeypatch.setattr(checkpointer, "_is_checkpoint", write_meanwhile)
    loaded = Checkpointer(folder).load_latest()
    assert loaded is not None and loaded["step"] == 2


class Bomb:
    def __init__(self, crater: Path) -> None:
        self.crater = crater

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.crater),)


def test_pickled_code_is_refused_with_the_reason(tmp_path: Path) -> None:
    crater, content = tmp_path / "crater", {"format": 1, "step": 2, "state": {}, "kinds": {}, "rng": []}
    content["state"] = {"model": {"weight": Bomb(crater)}}
    path = tmp_path / "step-000000002.pt"
    with open(path, "wb") as file, pytest.raises(CheckpointError):
        dump(content, file)  # complains, but the file with its right checksum is there
    with pytest.raises(CheckpointError, match=r"Cannot read .*2\.pt: .*nsupported.*mkdir"):
        Checkpointer(tmp_path).load_latest()
    torch.save(content, path)
    with pytest.raises(CheckpointError, match="a Checkpointer did not write it"):
        Checkpointer(tmp_path).load(path)
    with pytest.raises(CheckpointError, match=r"Cannot save state\.stats\.extra: .*mkdir.* Save numbers"):
        save_one(tmp_path, 3, stats={"mean": 1.0, "extra": Bomb(crater)})
    with pytest.raises(CheckpointError, match=r"Cannot save state\.best: .*numpy.*scalar"):
        save_one(tmp_path, 3, model=net(), best=np.float64(0.5))
    assert not crater.exists() and os.listdir(tmp_path) == [path.name]


def test_a_checkpoint_of_another_format_says_so(tmp_path: Path) -> None:
    with open(tmp_path / "step-000000001.pt", "wb") as file:
        dump({"format": 2}, file)
    with pytest.raises(CheckpointError, match="its format is 2, this ddpkit reads 1"):
        Checkpointer(tmp_path).load_latest()


# Nothing is half loaded


class Counter:
    def __init__(self, count: int) -> None:
        self.counts = [count]

    def state_dict(self) -> dict[str, Any]:
        return {"counts": self.counts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.counts[:] = state["counts"]
        if self.counts == [13]:
            raise ValueError("thirteen")


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
        ({"model": wide}, r"model has 0\.weight of shape \(3, 4\) there, of \(5, 4\) here"),
        ({"model": deep}, r"model has 1\.running_mean there, not here"),
        ({"model": nn.Sequential(*net(), nn.Linear(1, 1))}, r"model has 3\.weight here, not there"),
        ({"optimizer": torch.optim.Adam(same.parameters())}, "optimizer is SGD there, Adam here"),
        (
            {"optimizer": torch.optim.SGD([same[0].weight])},
            r"optimizer has groups of \[6\] tensors there, of \[1\] here",
        ),
        ({"ema": same}, "ema is not in it, but model, optimizer, good, bad is"),
        ({"bad": Counter(0)}, "ValueError: thirteen"),
    ]
    for wrong, message in cases:
        fit = {"model": same, "optimizer": fit_optimizer, "good": counter} | wrong
        before = [flat(fit["model"]), str(fit["optimizer"].state_dict()), torch.get_rng_state().tolist()]
        with pytest.raises(CheckpointError, match=message):
            checkpoints.load_latest(**fit)
        assert before == [flat(fit["model"]), str(fit["optimizer"].state_dict()), torch.get_rng_state().tolist()]
        assert counter.counts == [0] and wrong.get("bad", counter).counts == [0]
    with pytest.raises(TypeError, match="note='x' has no load_state_dict"):
        checkpoints.load_latest(note="x")
    assert checkpoints.load_latest(model=same, optimizer=fit_optimizer, good=counter)["step"] == 1
    assert flat(same) == flat(model) and counter.counts == [3] and fit_optimizer.param_groups[0]["lr"] == 0.1


def test_what_does_not_fit_changes_nothing_and_is_named(tmp_path: Path) -> None:
    on_ranks(load_what_does_not_fit, 1, str(tmp_path))


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
    with pytest.raises(ValueError, match="per_rank cannot hold step, score: under the names step, score load"):
        Checkpointer(tmp_path).save(1, per_rank={"step": 7, "mine": 1, "score": 2.0})
    assert os.listdir(tmp_path) == ["file"]


# Files that are whole, but odd


def odd(value: Any) -> st.SearchStrategy[Any]:
    """The value with one part replaced or left out."""
    strange = st.sampled_from([None, -1, 2**70, 1.5, "x", b"x", [], {}, [[]], {"a": 1}, {1: 2}, (1, 2), torch.ones(2)])
    if isinstance(value, dict) and value:
        key = st.sampled_from(list(value))
        changed = key.flatmap(lambda k: odd(value[k]).map(lambda new: {**value, k: new}))
        return st.one_of(strange, changed, changed, key.map(lambda k: {i: v for i, v in value.items() if i != k}))
    if isinstance(value, list | tuple) and value and len(value) < 700:
        place = st.integers(0, len(value) - 1)
        return st.one_of(
            strange, place.flatmap(lambda i: odd(value[i]).map(lambda new: [*value[:i], new, *value[i + 1 :]]))
        )
    return strange


def whole_run() -> dict[str, Any]:
    model, optimizer, scheduler = make_run()
    train(model, optimizer, scheduler)
    loader = ddpkit.make_loader(range(20), 4)
    scaler = torch.amp.GradScaler("cpu")
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader, "scaler": scaler}


def state_of_all(run: dict[str, Any]) -> str:
    return str({name: states.fingerprint(name, value.state_dict()) for name, value in run.items()})


def fuzz_contents(folder: str) -> tuple[int, int]:
    saved = whole_run()
    path = Checkpointer(folder).save(2, **saved, note=[1, "a"])
    content = torch.load(path, weights_only=True)
    Checkpointer(folder).save(1, **saved, note=[1, "a"])
    outcomes, run = [0, 0], whole_run()
    before = state_of_all(run)

    @settings(max_examples=80, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(odd(content))
    def try_one(changed: Any) -> None:
        with open(path, "wb") as file:
            dump(changed, file)
        Path(folder, "latest").write_text("step-000000002.pt\nstep-000000001.pt\n")
        drawn = torch.get_rng_state()
        try:
            Checkpointer(folder).load(path, **run)
            outcomes[0] += 1
            run.update(whole_run())
        except CheckpointError as error:
            outcomes[1] += 1
            assert state_of_all(run) == before and torch.equal(drawn, torch.get_rng_state())
            assert "step-000000002.pt" in str(error), error
        with suppress(CheckpointError):  # it may be whole, and not fit
            assert Checkpointer(folder).load_latest()["step"] in (1, 2, 2**70)

    logging.getLogger("ddpkit").setLevel(logging.ERROR)
    try_one()
    return outcomes[0], outcomes[1]


def test_whatever_a_file_holds_the_run_is_restored_or_untouched(tmp_path: Path) -> None:
    restored, refused = on_ranks(fuzz_contents, 1, str(tmp_path), timeout=120.0)[0]
    assert refused > 20, (restored, refused)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: [1, 2], "it holds a list, which no Checkpointer wrote"),
        (
            lambda content: {"format": 1, "step": 2},
            "its state, kinds, rng is missing or not what a Checkpointer writes",
        ),
        (lambda content: content | {"step": "2"}, "its step is missing"),
        (lambda content: content | {"state": [1]}, "its state is missing"),
        (lambda content: content | {"state": {1: 2}}, "its state is missing"),
        (lambda content: content | {"rng": []}, "its rng is missing"),
        (
            lambda content: content | {"per_rank": [{"per_rank": {}, "shapes": {}, "kinds": {"a": 1}}]},
            "its per_rank is",
        ),
        (lambda content: content | {"rng": [{}]}, "its random states are none that this Python, NumPy and torch"),
        (
            lambda content: other_rng(content, python=(4, [1], None)),
            r"random states .*ValueError: state with version 4",
        ),
        (lambda content: other_rng(content, numpy=("PCG64", [1], 0, 0, 0.0)), r"random states .*\(ValueError"),
        (lambda content: other_rng(content, torch=torch.zeros(3)), r"random states .*\(TypeError"),
        (
            lambda content: other_rng(content, torch=torch.zeros(3, dtype=torch.uint8)),
            r"random states .*\(RuntimeError",
        ),
    ],
)
def test_an_odd_file_is_refused_and_the_one_before_it_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, change: Any, message: str
) -> None:
    save_one(tmp_path, 1, model=net())
    path = save_one(tmp_path, 2, model=net())
    content = torch.load(path, weights_only=True)
    with open(path, "wb") as file:
        dump(change(content), file)
    model, drawn = net(), torch.get_rng_state()
    before = flat(model)
    with pytest.raises(CheckpointError, match=message):
        Checkpointer(tmp_path).load(path, model=model)
    assert flat(model) == before and torch.equal(torch.get_rng_state(), drawn)
    assert Checkpointer(tmp_path).load_latest(model=model)["step"] == 1
    assert re.search(message, caplog.text)
    if "random states" in message:
        assert Checkpointer(tmp_path).load(path)["step"] == 2


def other_rng(content: dict[str, Any], **parts: Any) -> dict[str, Any]:
    return content | {"rng": [content["rng"][0] | parts]}


# All ranks or none


class Loud:
    """Refuses what it is to load, with a message."""

    def __init__(self, message: str) -> None:
        self.message = message

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None:
        if self.message:
            raise ValueError(self.message)


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
        assert "is in per_rank and beside it" in said["twice"]
        assert "MismatchError" in said["targets"] and "MismatchError" in said["load"]
        assert "has no load_state_dict()" in said["no target"]
        assert "different collectives" in said["calls"]
        for case in ("no dict", "no names", "no path"):
            words = "path must be" if case == "no path" else "per_rank must be a dict of values by name"
            assert said[case].startswith("TypeError" if rank == 1 else "MismatchError"), said[case]
            assert words in said[case]
        assert "Cannot read" in said["no text"] and "\\udcff.pt" in said["no text"]
        assert "Cannot read" in said["null"] and "null" in said["null"]
        for case, words in {"long": "xxxxxxxx", "odd": "cannot read \\udcff"}.items():
            assert said[case].startswith("CheckpointError") and words in said[case], said[case][:1000]
            assert len(said[case]) < 50_000


def message_of(fn: Any, *args: Any, **kwargs: Any) -> str:
    try:
        fn(*args, **kwargs)
    except CheckpointError as error:
        return str(error)
    return ""


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
    os.truncate(path, 1000)
    os.truncate(f"{folder}/step-000000002.pt", 1000)
    said["all broken"] = message_of(checkpoints.load_latest)
    return said


def test_what_does_not_fit_is_named_in_the_models_order_so_that_ranks_agree(tmp_path: Path) -> None:
    narrow, wide = (nn.Sequential(*(nn.Linear(size, size) for _ in range(4))) for size in (2, 3))
    Checkpointer(tmp_path).save(1, model=narrow)
    with pytest.raises(CheckpointError) as caught:
        Checkpointer(tmp_path).load_latest(model=wide)
    assert re.findall(r"model has (\S+) of shape", str(caught.value)) == list(wide.state_dict())


def test_a_failure_on_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    said, same = on_ranks(fails_on_one_rank, 2, str(tmp_path))
    assert "2 different files" in said.pop("other file") and "2 different files" in same.pop("other file")
    assert said == same
    assert "Cannot write to" in said["full"] and "File too large" in said["full"]
    assert "Not a directory" in said["no folder"]
    assert said["other model"].startswith("Rank 1: ") and "0.weight of shape" in said["other model"]
    assert said["missing file"].startswith("Rank 1: Cannot read elsewhere.pt: [Errno 2] No such file")
    assert said["damaged copy"].startswith("Rank 1: Cannot read ") and "truncated" in said["damaged copy"]
    assert "No checkpoint in" in said["all broken"] and said["all broken"].count("truncated") == 2
