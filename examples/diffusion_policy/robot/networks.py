"""Networks: a one-dimensional U-Net over time that predicts the noise in actions, and a ResNet for pictures.

The U-Net is that of Chi et al. 2023 (arXiv:2303.04137): residual blocks of two convolutions, modulated by the diffusion
step and the observations, which pass a small network first. The last feature maps of the ResNet (He et al. 2016,
arXiv:1512.03385) become points or means. GroupNorm, unlike BatchNorm, treats each sample alone and keeps no statistics,
which a moving average of the weights (EMA) would need, too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from shared.networks import make_module
from shared.program import UserError, user_error
from torch import nn
from torch.utils.checkpoint import checkpoint


def make_network(config: dict[str, Any], channels: int, observation: int) -> nn.Module:
    """Make the network that predicts noise: the U-Net, or a class of the user's with the same interface. Collective."""
    name = config["algo.network.class"]
    if name is not None:
        return make_module("algo.network.class", name, (channels, observation), config["algo.network.kwargs"])
    with user_error("algo.unet", ValueError):
        return UNet1D(
            channels,
            observation,
            down_dims=config["algo.unet.down_dims"],
            kernel_size=config["algo.unet.kernel_size"],
            n_groups=config["algo.unet.n_groups"],
            step_size=config["algo.unet.diffusion_step_embed_dim"],
            checkpointing=config["train.gradient_checkpointing"],
        )


class StepEmbedding(nn.Module):
    """Sines and cosines of a diffusion step, (batch,) to (batch, size), as in the transformer."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.exp(torch.linspace(0, -math.log(10000), size // 2)), persistent=False)

    def forward(self, step: torch.Tensor) -> torch.Tensor:
        angles = step[:, None] * self.frequencies
        return torch.cat([angles.sin(), angles.cos()], dim=1)


def convolve(inputs: int, outputs: int, kernel_size: int, groups: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv1d(inputs, outputs, kernel_size, padding=kernel_size // 2), nn.GroupNorm(groups, outputs), nn.Mish()
    )


class Block(nn.Module):
    """Two convolutions with a residual connection; the condition scales and shifts the channels between them (FiLM)."""

    def __init__(self, inputs: int, outputs: int, condition: int, kernel_size: int, groups: int) -> None:
        super().__init__()
        self.first = convolve(inputs, outputs, kernel_size, groups)
        self.second = convolve(outputs, outputs, kernel_size, groups)
        self.film = nn.Sequential(nn.Mish(), nn.Linear(condition, 2 * outputs))
        self.shortcut = nn.Conv1d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        scale, shift = self.film(condition).unsqueeze(-1).chunk(2, dim=1)
        return self.second((1 + scale) * self.first(x) + shift) + self.shortcut(x)


class UNet1D(nn.Module):
    """Predict the noise in a chunk of actions from the diffusion step and the observations.

    An action has `channels` numbers, the observations together `observation`. `down_dims` are the channels at each
    resolution; the time axis is halved between two of them. With `checkpointing`, the backward pass recomputes a
    block's activations, to save memory.
    """

    def __init__(
        self,
        channels: int,
        observation: int,
        *,
        down_dims: Sequence[int],
        kernel_size: int,
        n_groups: int,
        step_size: int,
        checkpointing: bool,
    ) -> None:
        super().__init__()
        self.checkpointing, condition = checkpointing, 3 * step_size
        self.embed = nn.Sequential(
            StepEmbedding(step_size),
            nn.Linear(step_size, 4 * step_size),
            nn.Mish(),
            nn.Linear(4 * step_size, step_size),
        )
        self.see = nn.Sequential(nn.Linear(observation, 128), nn.Mish(), nn.Linear(128, 2 * step_size))

        def pair(inputs: int, outputs: int) -> nn.ModuleList:
            return nn.ModuleList(Block(i, outputs, condition, kernel_size, n_groups) for i in (inputs, outputs))

        finest, coarsest, links = down_dims[0], down_dims[-1], list(itertools.pairwise(down_dims))
        self.down = nn.ModuleList([pair(channels, finest), *(pair(fine, coarse) for fine, coarse in links)])
        self.shrink = nn.ModuleList(nn.Conv1d(fine, fine, 3, stride=2, padding=1) for fine, _ in links)
        self.middle = pair(coarsest, coarsest)
        self.up = nn.ModuleList(pair(2 * coarse, fine) for fine, coarse in reversed(links))
        self.grow = nn.ModuleList(nn.ConvTranspose1d(fine, fine, 4, stride=2, padding=1) for fine, _ in reversed(links))
        self.last = nn.Sequential(convolve(2 * finest, finest, kernel_size, n_groups), nn.Conv1d(finest, channels, 1))

    def forward(self, actions: torch.Tensor, step: torch.Tensor, observations: torch.Tensor) -> torch.Tensor:
        """Map actions (batch, time, channels), step (batch,), observations (batch, numbers) to noise like actions."""
        condition = torch.cat([self.embed(step), self.see(observations)], dim=1)
        x, skipped = self._run(self.down[0], actions.transpose(1, 2), condition), []
        for shrink, blocks in zip(self.shrink, self.down[1:], strict=True):
            skipped.append(x)
            x = self._run(blocks, shrink(x), condition)
        skipped.append(x)
        x = self._run(self.middle, x, condition)
        for blocks, grow in zip(self.up, self.grow, strict=True):
            x = grow(self._run(blocks, torch.cat([x, skipped.pop()], dim=1), condition))
        return self.last(torch.cat([x, skipped.pop()], dim=1)).transpose(1, 2)

    def _run(self, blocks: nn.ModuleList, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        for block in blocks:
            if self.checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, condition, use_reentrant=False)
            else:
                x = block(x, condition)
        return x


class ResidualBlock(nn.Module):
    """Two convolutions with a residual connection; names as in torchvision, so that its weights fit."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = _normalize(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = _normalize(outputs)
        self.downsample = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), _normalize(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.bn1(self.conv1(x)).relu()
        return (self.bn2(self.conv2(inner)) + self.downsample(x)).relu()


def _normalize(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(max(1, channels // 16), channels)


class ResNet(nn.Module):
    """Compute features of pictures, (batch, height, width, 3) in uint8 to (batch, features).

    "SpatialSoftmax" finds `keypoints` points in the feature maps; "SpatialMeanPool" takes each map's mean. The first
    stage of a "ResNet18Conv" has `width` channels, 64 in the paper; other backbones are torchvision's.
    """

    def __init__(self, features: int, *, backbone: str, pool: str, keypoints: int, width: int) -> None:
        super().__init__()
        stages = _resnet18(width) if backbone == "ResNet18Conv" else _torchvisions(backbone)
        for name, stage in stages.items():
            self.add_module(name, stage)
        block = stages["layer4"][-1]
        maps = getattr(block, "conv3", block.conv2).out_channels
        if pool == "SpatialSoftmax":
            self.pool: nn.Module = SpatialSoftmax(maps, keypoints)
            self.head = nn.Linear(2 * keypoints, features)
        else:
            self.pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
            self.head = nn.Linear(maps, features)

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        x = pictures.permute(0, 3, 1, 2).float() / 127.5 - 1
        x = self.maxpool(self.bn1(self.conv1(x)).relu())
        for stage in (self.layer1, self.layer2, self.layer3, self.layer4):
            x = stage(x)
        return self.head(self.pool(x))

    def load_pretrained(self, weights: dict[str, torch.Tensor]) -> list[str]:
        """Load the weights that fit, such as torchvision's; return the names of the others."""
        mine = self.state_dict()
        fitting = {name: value for name, value in weights.items() if name in mine and mine[name].shape == value.shape}
        self.load_state_dict(mine | fitting)
        return sorted(weights.keys() - fitting.keys())


def _resnet18(width: int) -> dict[str, nn.Module]:
    stages: dict[str, nn.Module] = {
        "conv1": nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False),
        "bn1": _normalize(width),
        "maxpool": nn.MaxPool2d(3, stride=2, padding=1),
    }
    widths = [width, width, 2 * width, 4 * width, 8 * width]
    for number, (inputs, outputs) in enumerate(itertools.pairwise(widths), 1):
        blocks = ResidualBlock(inputs, outputs, 1 if number == 1 else 2), ResidualBlock(outputs, outputs, 1)
        stages[f"layer{number}"] = nn.Sequential(*blocks)
    return stages


def _torchvisions(backbone: str) -> dict[str, nn.Module]:
    try:
        from torchvision.models import get_model
    except (ImportError, RuntimeError) as error:  # RuntimeError: built for another torch
        raise UserError(
            f"observation.encoder.rgb.core_kwargs.backbone_class: {backbone} needs torchvision ({error}): "
            "pip install torchvision, or set ResNet18Conv"
        ) from error
    network = get_model(backbone.lower().removesuffix("conv"), weights=None, norm_layer=_normalize)
    names = ("conv1", "bn1", "maxpool", "layer1", "layer2", "layer3", "layer4")
    return {name: getattr(network, name) for name in names}


class SpatialSoftmax(nn.Module):
    """Locate the maxima of feature maps, (batch, channels, height, width) to (batch, 2 x keypoints) in [-1, 1].

    References: Levine et al. 2016 (arXiv:1504.00702).
    """

    def __init__(self, channels: int, keypoints: int) -> None:
        super().__init__()
        self.choose = nn.Conv2d(channels, keypoints, 1)

    def forward(self, maps: torch.Tensor) -> torch.Tensor:
        maps = self.choose(maps)
        height, width = maps.shape[2:]
        weights = maps.flatten(2).float().softmax(-1).view_as(maps)
        down = torch.linspace(-1, 1, height, device=maps.device)
        right = torch.linspace(-1, 1, width, device=maps.device)
        points = (weights.sum(3) * down).sum(2), (weights.sum(2) * right).sum(2)
        return torch.cat(points, dim=1)
