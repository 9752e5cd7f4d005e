"""A network that has what networks have: statistics of batches, dropout, blocks that are computed twice."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Net(nn.Module):
    """Takes any number of frames, (batch, frames, 3, height, width), and corrects them."""

    def __init__(self, width: int, *, depth: int = 1, dropout: float = 0.0, checkpointing: bool = False) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.first = nn.Conv3d(3, width, (1, 3, 3), padding=(0, 1, 1))
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(depth))
        self.last = nn.Conv3d(width, 3, (1, 3, 3), padding=(0, 1, 1))

    def forward(self, frames: Tensor) -> Tensor:
        x = self.first(frames.transpose(1, 2))
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.checkpointing else block(x))
        return frames + 0.1 * self.last(torch.relu(x)).transpose(1, 2)


class Block(nn.Sequential):
    def __init__(self, width: int, dropout: float) -> None:
        convolution = nn.Conv3d(width, width, 3, padding=1)
        super().__init__(convolution, nn.BatchNorm3d(width), nn.ReLU(), nn.Dropout(dropout))


class Middle(Net):
    """Returns the frame in the middle alone, which a loss would broadcast."""

    def forward(self, frames: Tensor) -> Tensor:
        return super().forward(frames)[:, frames.shape[1] // 2, None]


class Apart(nn.Module):
    """A loss: how far the features of a fixed network are apart, for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.see = nn.Conv3d(3, 4, 3)

    def forward(self, restored: Tensor, sharp: Tensor) -> Tensor:
        features = (self.see(frames.transpose(1, 2)) for frames in (restored, sharp))
        return torch.stack([*features]).diff(dim=0).square().mean((0, 2, 3, 4, 5))


class Idle(Net):
    """Has a part that nothing uses."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.spare = nn.Linear(2, 2)


class Pair(Net):
    """Returns what it has seen, too."""

    def forward(self, frames: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(frames), frames


class Detached(Net):
    """Loses its gradient."""

    def forward(self, frames: Tensor) -> Tensor:
        return super().forward(frames).detach()


class Turned(Net):
    """Returns (batch, channels, frames, height, width), which for three frames are as many numbers."""

    def forward(self, frames: Tensor) -> Tensor:
        return super().forward(frames).transpose(1, 2)


class Talkative(Net):
    """Returns more in evaluation."""

    def forward(self, frames: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        found = super().forward(frames)
        return found if self.training else (found, frames)


class Later(Net):
    """Has a layer that only training uses, and that gets its size from the first input."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.aside = nn.LazyConv3d(3, 1)

    def forward(self, frames: Tensor) -> Tensor:
        found = super().forward(frames)
        return found + self.aside(frames.transpose(1, 2)).transpose(1, 2) if self.training else found


class Placed(Net):
    """Knows the place of each pixel of its crops, and can restore nothing larger."""

    def __init__(self, width: int, size: int = 16) -> None:
        super().__init__(width)
        self.place = nn.Parameter(torch.zeros(3, size, size))

    def forward(self, frames: Tensor) -> Tensor:
        return super().forward(frames + self.place)


def norm(layer: nn.Module) -> nn.Module:
    """Normalise weights as published networks do; newer ones call torch's parametrization."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.utils.weight_norm(layer)


class Normed(Net):
    """Its weights are computed from others before each call; another layer gets its size from the first input."""

    def __init__(self, width: int) -> None:
        super().__init__(width, depth=0)
        self.first = norm(self.first)
        self.last = nn.LazyConv3d(3, (1, 3, 3), padding=(0, 1, 1))


class Picky(Net):
    """Refuses its width."""

    def __init__(self, width: int) -> None:
        if width % 3:
            raise KeyError(f"width {width}")
        super().__init__(width)


class Bare(nn.Module):
    """Has no parameters."""

    def forward(self, frames: Tensor) -> Tensor:
        return frames


def no_module() -> str:
    return "a network"


class Terms(nn.Module):
    """A loss of several terms."""

    def forward(self, restored: Tensor, sharp: Tensor) -> dict[str, Tensor]:
        return {"l1": (restored - sharp).abs()}


class Still(Apart):
    """A loss without a gradient."""

    def forward(self, restored: Tensor, sharp: Tensor) -> Tensor:
        return super().forward(restored.detach(), sharp)


class Noise(nn.Module):
    """Finds noise in actions, with statistics of batches and dropout; in one number of an action only, if asked."""

    def __init__(self, channels: int, observation: int, *, width: int = 16, one: bool = False) -> None:
        super().__init__()
        self.see = nn.Sequential(nn.Linear(observation + 1, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.5))
        self.find = nn.Linear(width + channels, 1 if one else channels)

    def forward(self, actions: Tensor, step: Tensor, observations: Tensor) -> Tensor:
        seen = self.see(torch.cat([observations, step[:, None] / 100], dim=1))
        return self.find(torch.cat([actions, seen[:, None].expand(-1, actions.shape[1], -1)], dim=2))


class NoiseAndStep(Noise):
    """Finds noise, and returns it with something else."""

    def forward(self, actions: Tensor, step: Tensor, observations: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(actions, step, observations), step


class DetachedNoise(Noise):
    """Loses its gradient."""

    def forward(self, actions: Tensor, step: Tensor, observations: Tensor) -> Tensor:
        return super().forward(actions, step, observations).detach()


class TurnedNoise(Noise):
    """Returns (batch, numbers, time)."""

    def forward(self, actions: Tensor, step: Tensor, observations: Tensor) -> Tensor:
        return super().forward(actions, step, observations).transpose(1, 2)


class LaterNoise(Noise):
    """Has a layer that only training uses, and that gets its size from the first input."""

    def __init__(self, channels: int, observation: int) -> None:
        super().__init__(channels, observation)
        self.aside = nn.LazyLinear(channels)

    def forward(self, actions: Tensor, step: Tensor, observations: Tensor) -> Tensor:
        found = super().forward(actions, step, observations)
        return found + self.aside(actions) if self.training else found


class TalkativeNoise(Noise):
    """Returns more in evaluation."""

    def forward(self, actions: Tensor, step: Tensor, observations: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        found = super().forward(actions, step, observations)
        return found if self.training else (found, step)


class NormedNoise(Noise):
    """Its weights are computed from others before each call; another layer gets its size from the first input."""

    def __init__(self, channels: int, observation: int) -> None:
        super().__init__(channels, observation)
        self.see = nn.Sequential(norm(nn.Linear(observation + 1, 16)), nn.ReLU())
        self.find = nn.LazyLinear(channels)


class Silent(nn.Module):
    """Finds no noise, by no parameters."""

    def __init__(self, channels: int, observation: int) -> None:
        super().__init__()

    def forward(self, actions: Tensor, step: Tensor, observations: Tensor) -> Tensor:
        return 0 * actions


def no_noise(channels: int, observation: int) -> str:
    return "a network"


class Spare(Noise):
    """Has a layer that it does not use."""

    def __init__(self, channels: int, observation: int) -> None:
        super().__init__(channels, observation)
        self.spare = nn.Linear(2, 2)
