"""Restore whole clips window by window and tile by tile; only one tile at a time is on the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from shared.program import users_code
from torch import Tensor, nn

from deblurring.data import reverse
from deblurring.networks import as_float, check_restored, inputs

OVERLAP = 20  # of tiles, in pixels of the blurred frames, as in the original
CUT = OVERLAP // 2  # pixels of the restored frames that a tile loses at each side with a neighbour
Place = tuple[int, int, int]  # a first frame, row and column


@torch.no_grad()
def restore(
    net: nn.Module,
    clip: Mapping[str, Tensor],
    opt: Mapping[str, Any],
    device: torch.device,
    tick: Callable[[], object] = lambda: None,
) -> Tensor:
    """Restore a whole clip, bytes by part as in crops, to (frames, 3, scale · height, scale · width).

    Windows of `num_frame_testing` frames overlap and are averaged. Tiles of `size_patch_testing` pixels lose their
    borders; where they still overlap, at the end of a row or column, they are averaged. `tick` is called after each.
    """
    val, clip = opt["val"], {part: clip[part] for part in ("L", "S") if part in clip}
    frames = len(clip["L"])
    if val["pad_seq"]:
        clip = {part: torch.cat([values, values[-1:]]) for part, values in clip.items()}
    if val["flip_seq"]:
        clip = {part: torch.cat([values, reverse(values, part)]) for part, values in clip.items()}
    restored = _restore(net, clip, opt, device, tick)
    if val["flip_seq"]:
        there, back = restored.chunk(2)
        restored = (there + back.flip(0)) / 2
    return restored[:frames]


def count_tiles(frames: int, height: int, width: int, opt: Mapping[str, Any]) -> int:
    """Count the network calls for a clip; height and width are those of the blurred frames."""
    frames = (frames + opt["val"]["pad_seq"]) * (1 + opt["val"]["flip_seq"])
    return len(_places((frames, height, width), _sizes((frames, height, width), opt), opt))


def _restore(
    net: nn.Module, clip: Mapping[str, Tensor], opt: Mapping[str, Any], device: torch.device, tick: Callable[[], object]
) -> Tensor:
    frames, channels, height, width = clip["L"].shape
    whole, scale = (frames, height, width), opt["scale"]
    sizes = _sizes(whole, opt)
    total = torch.zeros(frames, channels, height * scale, width * scale)
    count = torch.zeros(frames, 1, height * scale, width * scale, dtype=torch.int16)
    for place in _places(whole, sizes, opt):
        tile = {part: _take(values, place, sizes, 2 if part == "S" else 1) for part, values in clip.items()}
        tile = as_float({part: _fill(values, opt, part) for part, values in tile.items()}, device)
        at_once, _, tall, wide = tile["L"].shape
        remedy = "; val.num_frame_testing and val.size_patch_testing set the size"
        with users_code(f"netG.net_type: the network fails on {at_once} frames of {wide} x {tall}", remedy):
            restored = net(*(values[None] for values in inputs(tile)))
        check_restored(restored, (1, at_once, channels, tall * scale, wide * scale))
        out = restored[0].float().cpu()
        here, inside = _without_cuts(place, sizes, whole, scale)
        total[here] += out[inside]
        count[here] += 1
        tick()
    return total.div_(count)


def _without_cuts(place: Place, sizes: Sequence[int], whole: Sequence[int], scale: int) -> list[tuple[slice, ...]]:
    """Return the place of a restored tile without its borders, in the clip and in the tile itself."""
    here, inside = [], []
    for begin, size, length, factor, cut in zip(place, sizes, whole, (1, scale, scale), (0, CUT, CUT), strict=True):
        end = min(begin + size, length)
        first = begin * factor + (cut if begin > 0 else 0)
        last = end * factor - (cut if end < length else 0)
        here.append(slice(first, last))
        inside.append(slice(first - begin * factor, last - begin * factor))
    return [(frames, slice(None), rows, columns) for frames, rows, columns in (here, inside)]


def _sizes(whole: Sequence[int], opt: Mapping[str, Any]) -> Place:
    """Return the number of frames, rows and columns that the network takes at once."""
    tile = opt["val"]["size_patch_testing"]
    return opt["val"]["num_frame_testing"] or whole[0], tile or whole[1], tile or whole[2]


def _places(whole: Sequence[int], sizes: Sequence[int], opt: Mapping[str, Any]) -> list[Place]:
    overlaps = (opt["val"]["num_frame_overlapping"], OVERLAP, OVERLAP)
    times, rows, columns = (starts(*axis) for axis in zip(whole, sizes, overlaps, strict=True))
    return [(time, row, column) for time in times for row in rows for column in columns]


def starts(length: int, size: int, overlap: int) -> list[int]:
    """Return the starts of pieces of `size` that cover `length` and overlap by at least `overlap`."""
    if length <= size:
        return [0]
    return [*range(0, length - size, size - overlap), length - size]


def _take(values: Tensor, place: Place, sizes: Sequence[int], factor: int) -> Tensor:
    """Cut a tile out of a part that has one pixel for `factor` x `factor` of the blurred frames."""
    time, *corner = place
    rows, columns = (
        slice(begin // factor, (begin + size) // factor) for begin, size in zip(corner, sizes[1:], strict=True)
    )
    return values[time : time + sizes[0], :, rows, columns]


def _fill(values: Tensor, opt: Mapping[str, Any], part: str) -> Tensor:
    """Mirror whole clips and frames at their ends, up to a multiple of the network's window, as the original does.

    As there, an exact multiple gets another window, too.
    """
    window, val = opt["netG"].get("window_size"), opt["val"]
    if not window:
        return values
    factor = 2 if part == "S" else 1
    whole = (not val["num_frame_testing"], not val["size_patch_testing"], not val["size_patch_testing"])
    for dim, size, is_whole in zip((0, 2, 3), window, whole, strict=True):
        size = size if dim == 0 else size // factor
        if is_whole:
            more = (values.shape[dim] // size + 1) * size - values.shape[dim]
            values = torch.cat([values, values.flip(dim).narrow(dim, 0, min(more, values.shape[dim]))], dim)
    return values
