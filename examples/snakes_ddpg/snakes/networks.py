"""Define the two networks: an actor gives each way its probability, a critic gives each way its value."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from .features import FEATURES, WAYS


class Perceptron(nn.Sequential):
    """Map FEATURES -> hidden -> hidden -> WAYS, with ReLU between.

    With `bfloat16` set, the second layer computes in it, from float32 weights, which a CPU that has it
    does in a third of the time. The others stay in float32: in bfloat16 the first one, which sees the
    features, makes weaker players, and for the last one two ways may be almost as good.
    """

    def __init__(self, hidden: int) -> None:
        super().__init__(
            nn.Linear(FEATURES, hidden),
            nn.ReLU(inplace=True),
            nn.Linear(hidden, hidden),
            nn.ReLU(inplace=True),
            nn.Linear(hidden, WAYS),
        )
        self.bfloat16 = False

    def forward(self, seen: torch.Tensor) -> torch.Tensor:
        if not self.bfloat16:
            return super().forward(seen)
        first, activation, second, _, last = self
        hidden = activation(first(seen).bfloat16())  # in half the memory, and to the bits the same, as in float32
        with torch.autocast(hidden.device.type, torch.bfloat16):
            hidden = activation(second(hidden))
        return last(hidden.float())


def computes_in_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Tell if this CPU has instructions for matrices in bfloat16; without them it is slower than float32."""
    try:
        return re.search(r"\b(avx512|amx)_bf16\b", cpuinfo.read_text()) is not None
    except OSError:
        return False


def softmax(scores: torch.Tensor) -> torch.Tensor:
    """Take the softmax along the last axis. Along the first one torch takes a seventh of the time, for few ways."""
    return scores.movedim(-1, 0).contiguous().softmax(0).movedim(0, -1).contiguous()


class Actor(nn.Module):
    """Map what snakes see, float32 of shape (..., FEATURES), to the ways' probabilities, (..., WAYS)."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.layers = Perceptron(hidden)

    def forward(self, seen: torch.Tensor) -> torch.Tensor:
        return softmax(self.layers(seen))


class Critic(nn.Module):
    """Map what snakes see, float32 of shape (..., FEATURES), to the ways' values, (..., WAYS).

    It takes no action, as a critic of DDPG does, but gives all their values at once. The expected
    value of the actor's probabilities is `(values * probabilities).sum(-1)`; its gradient in them
    is `values` itself.
    """

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.values = Perceptron(hidden)  # not `layers`: nobody shall take a critic for an actor

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
