"""Checkpoints of a whole run: saved, and loaded on as many ranks or others, wrapped or not."""

from __future__ import annotations

import copy
import logging
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import on_ranks, same
from runs import (
    draw,
    files_in,
    flat,
    make_run,
    net,
    train,
)
from torch import nn

import ddpkit
from ddpkit.checkpoint.checkpointer import Checkpointer
from ddpkit.data.seeds import seed_everything
from ddpkit.parallel.wrap import wrap_model


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
    assert files_in(tmp_path) == ["latest", "step-000000007.pt"]


def save_plain(folder: str) -> None:
    seed_everything(0)
    model = net()
    seed_everything(0, per_rank=True)
    Checkpointer(folder).save(7, model=model)


def load_and_draw(folder: str) -> tuple[list[float], list[float], list[str]]:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("ddpkit")
    log.addHandler(handler)
    model, draws = net(), []
    for _ in range(2):
        Checkpointer(folder).load_latest(model=model)
        draws.append(draw())
    log.removeHandler(handler)
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
    Checkpointer(folder).save(1, model=model, raw=model.module.state_dict())
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
        raw = ddpkit.clean_state_dict(model.state_dict())
        checkpoints.save(last["step"] + 1, model=model, raw=raw)
        plain, from_raw = net(), net()
        checkpoints.load_latest(model=plain, raw=from_raw)
        assert flat(plain) == flat(from_raw) == flat(model)


def test_wrapped_plain_and_compiled_models_load_each_others_checkpoints(tmp_path: Path) -> None:
    assert on_ranks(saves_wrapped, 2, str(tmp_path))[0] == list(net().state_dict())
    on_ranks(load_each_other, 1, str(tmp_path))


def test_it_says_what_it_is(tmp_path: Path) -> None:
    assert repr(Checkpointer("/runs/a")) == "Checkpointer('/runs/a', keep=3)"
    assert (
        repr(Checkpointer("/runs/a", keep=np.int64(1), keep_best=2)) == "Checkpointer('/runs/a', keep=1, keep_best=2)"
    )


def save_from_two_directories(folder: str) -> tuple[list[int], int]:
    former = os.getcwd()
    home = os.environ.get("HOME", "")
    os.chdir(folder)
    os.environ["HOME"] = folder
    try:
        checkpoints, at_home = Checkpointer("runs/x"), Checkpointer("~/runs/y")
        model = net()
        checkpoints.save(1, model=model)
        os.makedirs("elsewhere", exist_ok=True)
        os.chdir("elsewhere")  # as Hydra does
        checkpoints.save(2, model=model)
        at_home.save(3, model=model)
        return checkpoints.steps(), checkpoints.load("~/runs/y/step-000000003.pt", model=model)["step"]
    finally:
        os.chdir(former)
        os.environ["HOME"] = home


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_folder_stays_the_same_in_whatever_directory_the_script_is(world_size: int, tmp_path: Path) -> None:
    assert on_ranks(save_from_two_directories, world_size, str(tmp_path)) == [([1, 2], 3)] * world_size
    assert sorted(os.listdir(tmp_path)) == ["elsewhere", "runs"]
    assert os.listdir(tmp_path / "elsewhere") == []
    assert sorted(os.listdir(tmp_path / "runs")) == ["x", "y"]
