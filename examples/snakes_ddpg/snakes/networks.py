"""Define the two networks: an actor gives each way its probability, a critic gives each way its value."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from .features import FEATURES, WAYS


def perceptron(hidden: int) -> nn.Sequential:
    """Make layers FEATURES -> hidden -> hidden -> WAYS, with ReLU between."""
    return nn.Sequential(
        nn.Linear(FEATURES, hidden),
        nn.ReLU(),
        nn.Linear(hidden, hidden),
        nn.ReLU(),
        nn.Linear(hidden, WAYS),
    )


class Actor(nn.Module):
    """Map what snakes see, float32 of shape (..., FEATURES), to the ways' probabilities, (..., WAYS)."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.layers = perceptron(hidden)

    def forward(self, seen: torch.Tensor) -> torch.Tensor:
        return self.layers(seen).softmax(-1)


class Critic(nn.Module):
    """Map what snakes see, float32 of shape (..., FEATURES), to the ways' values, (..., WAYS).

    It takes no action, as a critic of DDPG does, but gives all their values at once. The expected
    value of the actor's probabilities is `(values * probabilities).sum(-1)`; its gradient in them
    is `values` itself.
    """

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.values = perceptron(hidden)  # not `layers`: nobody shall take a critic for an actor

    def forward(self, seen: torch.Tensor) -> torch.Tensor:
        return self.values(seen)


def load_weights(network: Actor | Critic, path: Path) -> None:
    """Load a file that holds a network's state dict, and nothing else.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it holds anything else, or a network of other shapes.
    """
    what = "an actor" if isinstance(network, Actor) else "a critic"
    with _fitting(path, what):
        network.load_state_dict(_load(path))


def load_actor(path: Path) -> Actor:
    """Load the actor in a file, of whatever width; raise what `load_weights` does."""
    with _fitting(path, "an actor"):
        state = _load(path)
        actor = Actor(hidden=len(state["layers.0.bias"]))
        actor.load_state_dict(state)
        return actor


def _load(path: Path) -> dict[str, torch.Tensor]:
    return torch.load(path, map_location="cpu", weights_only=True)


@contextmanager
def _fitting(path: Path, what: str) -> Iterator[None]:
    """Say which file is missing, or does not fit, in place of torch's errors."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}: a run keeps its models in its folder trained_model")
    try:
        yield
    except Exception as error:  # not a file of torch, not of weights, or of other shapes
        first = " ".join(str(error).split()).partition(". ")[0].rstrip(".")  # the rest is advice of torch
        raise ValueError(
            f"{path} does not hold {what} from {FEATURES} features to {WAYS} ways ({type(error).__name__}: {first}). "
            "Train it anew: a model is good only for the features and the --hidden that it was trained with"
        ) from error
