"""The two networks: an actor that gives each way its probability, and twin critics that give each way its value."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from .features import FEATURES, WAYS


def perceptron(hidden: int) -> nn.Sequential:
    """FEATURES -> hidden -> hidden -> WAYS, with ReLU between."""
    return nn.Sequential(
        nn.Linear(FEATURES, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, WAYS)
    )


class Actor(nn.Module):
    """Takes what snakes see, float32 of shape (..., FEATURES), to the logarithms of the ways' probabilities."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.layers = perceptron(hidden)

    def forward(self, seen: torch.Tensor) -> torch.Tensor:
        return self.layers(seen).log_softmax(-1)


class Critic(nn.Module):
    """Takes what snakes see, float32 of shape (..., FEATURES), to values of shape (2, ..., WAYS), one row a twin.

    The value of an action is linear in it: `(values * action).sum(-1)`. For a one-hot action that is the value of the
    way taken, for the actor's probabilities the expected value, whose gradient in the action is `values` itself.
    """

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.twins = nn.ModuleList([perceptron(hidden), perceptron(hidden)])

    def forward(self, seen: torch.Tensor) -> torch.Tensor:
        return torch.stack([twin(seen) for twin in self.twins])


def load_weights(network: nn.Module, path: Path) -> None:
    """Loads a file that holds a network's state dict, and nothing else.

    Raises:
        ValueError: If the file is none, or is that of a network of other shapes.
    """
    try:
        network.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"{path} does not fit {type(network).__name__} from {FEATURES} features to {WAYS} ways: {reason}. "
            "A model is good only for the features and the --hidden that it was trained with"
        ) from error
