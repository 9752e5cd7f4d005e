"""Networks: `tiny_clip`, which takes and returns a few frames at once, or any class by its name."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from shared.networks import check_order, check_output, check_sizes, make_module, trying
from shared.program import users_code
from torch import Tensor, nn

from deblurring.clips import SPIKES, WINDOW
from deblurring.options import has_spikes

log = logging.getLogger(__name__)
KAIRS = {
    "vrt": "models.network_vrt:VRT",
    "rvrt": "models.network_rvrt:RVRT",
}  # by the names in KAIR's option files
SHAPE = "(batch, frames, channels, height, width)"
SLOPE = 0.1  # of the leaky ReLU
STEP = 0.03  # the size of the corrections; at full scale Adam's first steps would be too large


def as_float(batch: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Move a batch of bytes to a device and scale it to [0, 1]."""
    scales = {"H": 255, "L": 255, "S": SPIKES}
    return {part: values.to(device, non_blocking=True).float() / scales[part] for part, values in batch.items()}


def inputs(part: Mapping[str, Tensor]) -> list[Tensor]:
    """Return the arguments of every network: the blurred frames and, if there are any, the spikes."""
    return [part[name] for name in ("L", "S") if name in part]


def check_restored(frames: Tensor, shape: Sequence[int]) -> None:
    """Raise if a network returns no tensor, one without a gradient, or another shape than the sharp frames."""
    check_output("netG.net_type", frames, shape, SHAPE)


def try_out(net: nn.Module, sample: Mapping[str, NDArray[Any]], device: torch.device) -> None:
    """Call a network once in evaluation, where it may return something else; lazy modules get their sizes."""
    part = as_float({name: torch.from_numpy(values)[None] for name, values in sample.items()}, device)
    with trying(net), users_code("netG.net_type: the network fails"):
        check_restored(net(*inputs(part)), part["H"].shape)
        if part["H"].shape[1] == part["H"].shape[2]:
            two = {name: values[:, :2] for name, values in part.items()}
            check_order("netG.net_type", lambda: net(*inputs(two)), two["H"].shape, SHAPE)
    check_sizes("netG.net_type", net)


def inject_detail(blurred: Tensor, spikes: Tensor) -> Tensor:
    """Add to each blurred frame the spikes of its middle moment minus the mean spikes of its exposure, smoothed.

    Blurred frames are (batch, frames, 3, height, width), spikes (batch, frames, WINDOW, height / 2, width / 2), all in
    [0, 1]. Nothing is trained.
    """
    detail = spikes[:, :, WINDOW // 2] - spikes.mean(2)
    detail = F.avg_pool2d(F.pad(detail, (1, 1, 1, 1), mode="replicate"), 3, stride=1)  # spike counts are coarse
    return blurred + F.interpolate(detail, scale_factor=2).unsqueeze(2)


class TinyClip(nn.Module):
    """A residual network at half the resolution that takes all frames of a window at once.

    It corrects the result of detail injection or, without spikes, the blurred frames; untrained it changes nothing.
    """

    def __init__(self, num_frame: int, embed_dim: int, depth: int, spikes: bool) -> None:
        super().__init__()
        channels = num_frame * (4 * 3 + spikes * WINDOW)
        self.first = nn.Conv2d(channels, embed_dim, 3, padding=1)
        self.body = nn.Sequential(*(Block(embed_dim) for _ in range(depth)))
        self.last = nn.Conv2d(embed_dim, num_frame * 4 * 3, 3, padding=1)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, SLOPE)
                nn.init.zeros_(module.bias)
        for block in self.body:
            block.two.weight.data *= 0.3  # since the blocks' outputs add up
        nn.init.zeros_(self.last.weight)

    def forward(self, blurred: Tensor, spikes: Tensor | None = None) -> Tensor:
        """Shapes as in `inject_detail()`."""
        base = blurred if spikes is None else inject_detail(blurred, spikes)
        x = F.pixel_unshuffle(base.flatten(1, 2), 2) * 2 - 1
        if spikes is not None:
            x = torch.cat([x, 4 * (spikes - spikes.mean(2, keepdim=True)).flatten(1, 2)], 1)
        x = self.last(self.body(F.leaky_relu(self.first(x), SLOPE)))
        return base + STEP * F.pixel_shuffle(x, 2).view_as(base)


class Block(nn.Module):
    """Two convolutions with a residual connection."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.one = nn.Conv2d(channels, channels, 3, padding=1)
        self.two = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.two(F.leaky_relu(self.one(x), SLOPE))


def make_network(opt: Mapping[str, Any]) -> nn.Module:
    """Make the network that the options name. Collective."""
    arguments = dict(opt["netG"])
    kind = arguments.pop("net_type")
    if kind == "tiny_clip":
        return TinyClip(opt["datasets"]["train"]["num_frame"], **arguments, spikes=has_spikes(opt))
    name = KAIRS.get(kind, kind)
    section = f'netG={{"net_type": "{name}", …}}'
    remedy = f"; it gets all keys of netG, also from the option file: '{section}' on the command line replaces them"
    return make_module("netG.net_type", name, (), arguments, remedy)
