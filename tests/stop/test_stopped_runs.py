"""Runs that a signal stops at a random moment, and that go on as if nothing had happened."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import on_ranks

import ddpkit

pytestmark = pytest.mark.storm
SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]
SAMPLES = 240
EPOCHS = 2
LONGEST = 0.9  # seconds until the signal; a run takes longer, for in its steps it sleeps for more


def train(folder: Path, seed: int | None) -> dict[str, Any]:
    """Train from the last checkpoint on, until the end or until all stop: a signal comes to a random rank."""
    draw = random.Random(seed)
    signalled = draw.randrange(ddpkit.get_world_size())
    moment = draw.random() * LONGEST
    number = draw.choice(SIGNALS)
    pauses = random.Random(f"{seed} {ddpkit.get_rank()}")

    inputs = torch.linspace(-1, 1, SAMPLES)[:, None]
    loader = ddpkit.make_loader(torch.utils.data.TensorDataset(inputs, torch.arange(SAMPLES)), 2, seed=5)
    ddpkit.seed_everything(0)
    model = ddpkit.wrap_model(torch.nn.Linear(1, 1))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    checkpoints = ddpkit.Checkpointer(folder, keep=100)
    state = {"model": model, "optimizer": optimizer, "loader": loader}
    saved = checkpoints.load_latest(**state) or {"step": 0}
    step, seen = saved["step"], []
    if seed is not None and ddpkit.get_rank() == signalled:
        threading.Timer(moment, os.kill, (os.getpid(), number)).start()
    with ddpkit.stopping() as stop:
        for _ in loader.epochs(EPOCHS):
            for batch, numbers in loader:
                model(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                seen.append(numbers.tolist())
                step += 1
                if seed is not None:
                    time.sleep(pauses.random() / 50)
                if stop.now():
                    checkpoints.save(step, **state)
                    return {"seen": seen, "stopped": step, "reason": stop.reason, "code": stop.exit_code}
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    return {"seen": seen, "weights": weights, "steps": checkpoints.steps()}


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture(scope="module")
def undisturbed(ranks: int, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_ranks(train, ranks, tmp_path_factory.mktemp("undisturbed"), None, timeout=60)


@pytest.mark.parametrize("seed", range(25))
def test_a_signal_to_a_random_rank_costs_no_step(
    seed: int, ranks: int, undisturbed: list[dict[str, Any]], tmp_path: Path
) -> None:
    first = on_ranks(train, ranks, tmp_path, seed, timeout=60)
    for each in first:
        assert {name: each[name] for name in ("stopped", "reason", "code")} == {
            name: first[0][name] for name in ("stopped", "reason", "code")
        }
    assert first[0]["code"] > 128
    second = on_ranks(train, ranks, tmp_path, None, timeout=60)
    for before, after, whole in zip(first, second, undisturbed, strict=True):
        assert after["steps"] == [first[0]["stopped"]]
        assert before["seen"] + after["seen"] == whole["seen"]
        for mine, other in zip(after["weights"], whole["weights"], strict=True):
            # gloo adds three numbers in another order once DDP has sorted its buckets
            torch.testing.assert_close(mine, other, rtol=0, atol=0 if ranks == 2 else 1e-6)
