"""Files that are whole, but odd: other formats, and content that no Checkpointer wrote."""

from __future__ import annotations

import logging
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import on_ranks
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from runs import (
    flat,
    make_run,
    net,
    save_one,
    train,
)

import ddpkit
from ddpkit.checkpoint.checkpointer import Checkpointer
from ddpkit.checkpoint.files import dump
from ddpkit.checkpoint.states import digest_leaves
from ddpkit.errors import CheckpointError


def test_a_checkpoint_of_another_format_says_so(tmp_path: Path) -> None:
    with open(tmp_path / "step-000000001.pt", "wb") as file:
        dump({"format": 3}, file)
    with pytest.raises(CheckpointError, match="its format is 3, this ddpkit reads 1 and 2"):
        Checkpointer(tmp_path).load_latest()


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
    return str({name: digest_leaves(name, value.state_dict()) for name, value in run.items()})


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
            assert "step-000000002.pt" in str(error), error
            if "undefined state" in str(error):
                run.update(whole_run())
                return
            assert state_of_all(run) == before and torch.equal(drawn, torch.get_rng_state())
        with suppress(CheckpointError):  # it may be whole, and not fit
            assert Checkpointer(folder).load_latest()["step"] in (1, 2, 2**70)

    log = logging.getLogger("ddpkit")
    log.setLevel(logging.ERROR)
    try:
        try_one()
    finally:
        log.setLevel(logging.NOTSET)
    return outcomes[0], outcomes[1]


def test_whatever_a_file_holds_the_run_is_restored_or_untouched_or_said_to_be_undefined(tmp_path: Path) -> None:
    restored, refused = on_ranks(fuzz_contents, 1, str(tmp_path), timeout=120.0)[0]
    assert refused > 20, (restored, refused)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: [1, 2], "it holds a list, which no Checkpointer wrote"),
        (
            lambda content: {"format": 1, "step": 2},
            "its state, kinds, shapes, rng is missing or not what a Checkpointer writes",
        ),
        (lambda content: content | {"step": "2"}, "its step is missing"),
        (lambda content: content | {"step": True}, "its step is missing"),
        (lambda content: content | {"score": True}, "its score is missing"),
        (lambda content: content | {"score": "high"}, "its score is missing"),
        (lambda content: content | {"shapes": {"model": "high"}}, "its shapes is missing"),
        (lambda content: content | {"shapes": {"model": [[["high"]]]}}, "its shapes is missing"),
        (lambda content: content | {"format": "\x1b[31m"}, r"its format is \\x1b\[31m,"),
        (lambda content: content | {"state": [1]}, "its state is missing"),
        (lambda content: content | {"state": {1: 2}}, "its state is missing"),
        (lambda content: content | {"rng": []}, "its rng is missing"),
        (
            lambda content: content | {"per_rank": [{"per_rank": {}, "shapes": {}, "kinds": {"a": 1}}]},
            "its per_rank is",
        ),
        (lambda content: content | {"rng": [{}]}, "this Python, NumPy or torch cannot restore its random states"),
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
