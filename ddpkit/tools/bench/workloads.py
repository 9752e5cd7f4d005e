"""Define the settings of a measurement, and models for training steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

PARTS = ("collectives", "metrics", "barrier", "steps")
METRICS = 32  # in the dict that is averaged


class BadFlag(ValueError):
    """A flag asks for something that cannot be measured."""


@dataclass(frozen=True)
class Plan:
    """The settings of a measurement.

    Attributes:
        parts: Some of `PARTS`.
        sizes: Bytes of the collectives' tensors.
        batch_size: Samples per step: per rank for weak, in all for strong scaling.
        seconds: Per measurement.
        device: As `setup()` takes it.
    """

    parts: tuple[str, ...]
    sizes: tuple[int, ...]
    batch_size: int
    seconds: float
    device: str | None


@dataclass(frozen=True)
class Model:
    """A model to make training steps with.

    Attributes:
        module: The model.
        input_shape: The shape of one sample.
    """

    module: nn.Module
    input_shape: tuple[int, ...]

    def make_batch(self, samples: int) -> Tensor:
        """Make random inputs, of shape (samples, *input_shape)."""
        return torch.randn(samples, *self.input_shape)


def mlp() -> Model:
    """Make three linear layers."""
    module = nn.Sequential(
        nn.Linear(256, 512),
        nn.ReLU(),
        nn.Linear(512, 512),
        nn.ReLU(),
        nn.Linear(512, 10),
    )
    return Model(module, (256,))


def transformer() -> Model:
    """Make an encoder of two layers, for sequences of 16 tokens."""
    layer = nn.TransformerEncoderLayer(
        128,
        nhead=4,
        dim_feedforward=512,
        dropout=0.0,
        batch_first=True,
    )
    return Model(nn.TransformerEncoder(layer, num_layers=2), (16, 128))


MODELS: dict[str, Callable[[], Model]] = {"mlp": mlp, "transformer": transformer}


def make_step(module: nn.Module, batch: Tensor, device: torch.device) -> Callable[[], None]:
    """Make a function that does one training step: forward, backward from the mean, SGD."""
    inputs = batch.to(device)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-6)

    def step() -> None:
        optimizer.zero_grad()
        module(inputs).mean().backward()
        optimizer.step()

    return step
