"""What there is to measure: the plan, and models to make training steps with, ours and those that a user names."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

PARTS = ("collectives", "metrics", "barrier", "steps")
METRICS = 32  # in the dict that is averaged
MakeBatch = Callable[[int], Any]
Workload = tuple[nn.Module, MakeBatch]


class BadFlag(ValueError):
    """What the user asked for cannot be measured."""


@dataclass(frozen=True)
class Plan:
    """What to measure.

    Attributes:
        parts: Some of `PARTS`.
        sizes: Bytes of the collectives' tensors.
        models: Names, as `build` takes them; none if no steps are measured.
        batch_size: Samples per step: per rank for weak, in all for strong scaling.
        seconds: Per measurement.
        rounds: Per measurement.
        device: As `setup()` takes it.
        dp: Whether a job of one process measures DataParallel over all accelerators, too.
    """

    parts: tuple[str, ...]
    sizes: tuple[int, ...]
    models: tuple[str, ...]
    batch_size: int
    seconds: float
    rounds: int
    device: str | None
    dp: bool


def mlp() -> Workload:
    """Three linear layers."""
    layers = [nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)]
    return nn.Sequential(*layers), lambda n: torch.randn(n, 256)


def cnn() -> Workload:
    """Three convolutions on images of 32 x 32 pixels."""

    def block(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, stride=2, padding=1), nn.GroupNorm(8, outputs), nn.ReLU()]

    layers = [*block(3, 32), *block(32, 64), *block(64, 128), nn.Flatten(), nn.Linear(128 * 16, 10)]
    return nn.Sequential(*layers), lambda n: torch.randn(n, 3, 32, 32)


def transformer() -> Workload:
    """An encoder of two layers, on sequences of 16 tokens."""
    layer = nn.TransformerEncoderLayer(128, nhead=4, dim_feedforward=512, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, num_layers=2), lambda n: torch.randn(n, 16, 128)


BUILT_IN: dict[str, Callable[[], Workload]] = {"mlp": mlp, "cnn": cnn, "transformer": transformer}


def build(name: str) -> Workload:
    """A module, and the function that makes the arguments of its forward for a number of samples.

    Args:
        name: A built-in model; or `package.module:function` or `path/to/file.py:function`, where the function takes no
            arguments and returns the two.

    Raises:
        BadFlag: If there is none of that name, or it is not what it should be.
    """
    make = _find(name)
    try:
        made = make()
    except Exception as error:  # whatever the user's code does
        raise BadFlag(f"--model {name}: the function raised {type(error).__name__}: {error}") from error
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module) and callable(made[1])):
        found = (
            f"({', '.join(type(part).__name__ for part in made)})" if isinstance(made, tuple) else type(made).__name__
        )
        raise BadFlag(
            f"--model {name}: the function returned {found}; it should return a torch.nn.Module, and a function that "
            "makes the arguments of its forward from a number of samples."
        )
    return made


def _find(name: str) -> Callable[[], Any]:
    if ":" not in name:
        if name not in BUILT_IN:
            known = f"Built in are {', '.join(BUILT_IN)}; your own is package.module:function or file.py:function."
            raise BadFlag(f"--model {name}: no such model{_nearest(name, BUILT_IN)} {known}")
        return BUILT_IN[name]
    place, _, function = name.rpartition(":")
    folder = Path.cwd()
    if place.endswith(".py"):
        folder, place = Path(place).resolve().parent, Path(place).stem
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    try:
        module = import_module(place)
    except Exception as error:  # whatever the user's code does when it is imported
        raise BadFlag(f"--model {name}: cannot import {place}: {type(error).__name__}: {error}") from error
    if not callable(found := getattr(module, function, None)):
        names = [key for key, value in vars(module).items() if callable(value)]
        raise BadFlag(f"--model {name}: {place} has no function {function}{_nearest(function, names)}")
    return found  # type: ignore[no-any-return]


def _nearest(name: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {near[0]}?" if near else "."


def make_step(name: str, model: nn.Module, batch: Any, device: torch.device) -> Callable[[], None]:
    """One training step: forward, backward from the mean of what the model returns, SGD."""
    inputs = [part.to(device) for part in (batch if isinstance(batch, (tuple, list)) else (batch,))]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

    def step() -> None:
        optimizer.zero_grad()
        output = model(*inputs)
        if not isinstance(output, Tensor):
            raise TypeError(f"--model {name}: forward returned {type(output).__name__}; it should return one tensor.")
        output.mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step
