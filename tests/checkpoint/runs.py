"""Models and whole runs for the tests of checkpoints."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import ddpkit
from ddpkit.checkpoint.checkpointer import Checkpointer
from ddpkit.errors import CheckpointError
from ddpkit.parallel.wrap import wrap_model


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


def files_in(folder: Path) -> list[str]:
    return sorted(name for name in os.listdir(folder) if name != ".writer")


class Counter:
    def __init__(self, count: int) -> None:
        self.counts = [count]

    def state_dict(self) -> dict[str, Any]:
        return {"counts": self.counts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.counts[:] = state["counts"]
        if self.counts == [13]:
            raise ValueError("thirteen")


class Loud:
    """Refuses what it is to load, with a message."""

    def __init__(self, message: str) -> None:
        self.message = message

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None:
        if self.message:
            raise ValueError(self.message)


def message_of(fn: Any, *args: Any, **kwargs: Any) -> str:
    try:
        fn(*args, **kwargs)
    except CheckpointError as error:
        return str(error)
    return ""


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")  # type: ignore[return-value]  # the default takes long to import


class Halves:
    """Something with a state, as people write it; it changes what it holds in place and may raise then."""

    def __init__(self, value: int, fails: bool = False) -> None:
        self.values, self.fails, self.average = [value, value], fails, torch.full((2,), float(value))

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values, "average": self.average}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values[0] = state["values"][0]
        self.average.copy_(state["average"])
        if self.fails and state["values"] == [7, 7]:
            raise ValueError("halves")
        self.values[1] = state["values"][1]


def run_with(value: int, fails: bool = False, **more: Any) -> dict[str, Any]:
    torch.manual_seed(value)
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * value)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for _ in range(value):
        model(torch.rand(4, 2)).square().sum().backward()
        optimizer.step()
        scheduler.step()
    scaler, loader = torch.amp.GradScaler("cpu", init_scale=2.0**value), ddpkit.make_loader(range(20), 4)
    loader.set_epoch(value)
    ema = torch.optim.swa_utils.AveragedModel(model)
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler, "loader": loader}
    return parts | {"ema": ema, "halves": Halves(value, fails)} | more


class OwnPart:
    """An optimizer in the manner of ZeRO: each rank has the state of its own parameters."""

    def __init__(self, value: float) -> None:
        self.moment = torch.full((2 + ddpkit.get_rank(),), value)

    def state_dict(self) -> dict[str, Any]:
        return {"state": {0: {"moment": self.moment}}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.moment.copy_(state["state"][0]["moment"])
