"""Test a network on whole clips, which the ranks share: scores, pictures and a comparison with untrained methods."""

from __future__ import annotations

import csv
import json
import logging
import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from shared.networks import evaluating, trying
from shared.program import UserError, hides_bar, user_error
from skimage.metrics import structural_similarity
from torch import Tensor, nn
from tqdm import tqdm

import ddpkit
from deblurring.clips import WINDOW
from deblurring.data import Clip, find_clips
from deblurring.networks import as_float, inject_detail
from deblurring.options import has_spikes
from deblurring.tiles import count_tiles, restore

Picture = NDArray[np.uint8]
RATE = 10  # frames per second of a film: slow enough to look at
WINDOW_OF_SSIM = 11  # pixels
WIDEST = 1536  # pixels; the largest width of a picture for TensorBoard
Scores = dict[str, dict[str, float]]  # by "blurred", "injection" (with spikes) or "restored"; then by metric
Frames = dict[str, Scores]  # by the frame's name
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Report:
    """Scores of every frame by clip, in the order of the clips, and a picture of each."""

    frames: dict[str, Frames]
    pictures: dict[str, Picture]

    def clip(self, name: str) -> Scores:
        """Average the scores over the frames of a clip."""
        return _mean(list(self.frames[name].values()))

    def mean(self) -> Scores:
        """Average over the clips with equal weights, as in the original."""
        return _mean([self.clip(name) for name in self.frames])

    def table(self) -> str:
        """Write PSNR in dB and SSIM of every clip as Markdown."""
        average = self.mean()
        kinds = list(average)
        heads = ["clip", *(f"{kind} PSNR / SSIM" for kind in kinds), *(f"gain over {kind}" for kind in kinds[:-1])]
        lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
        for name, scores in {**{name: self.clip(name) for name in self.frames}, "mean": average}.items():
            cells = [name, *(f"{scores[kind]['psnr']:.2f} / {scores[kind]['ssim']:.4f}" for kind in kinds)]
            cells += [f"{scores['restored']['psnr'] - scores[kind]['psnr']:+.2f} dB" for kind in kinds[:-1]]
            lines.append(f"| {' | '.join(cells)} |")
        return "\n".join(lines)


def _mean(rows: list[Scores]) -> Scores:
    mean: Scores = {}
    for what, first in rows[0].items():
        mean[what] = {metric: sum(row[what][metric] for row in rows) / len(rows) for metric in first}
    return mean


def find_test_clips(opt: Mapping[str, Any]) -> list[Clip]:
    """Find the test clips and check that their files are complete, each on one rank. Collective."""
    if not opt["datasets"]["test"]["dataroot_gt"]:
        log.info("datasets.test has no dataroot_gt: its frames are restored and written, not scored")
    is_tiny = opt["netG"]["net_type"] == "tiny_clip"
    clips = find_clips(opt["datasets"]["test"], opt["val"]["num_frame_testing"] if is_tiny else 1, opt["scale"])
    frames = [(clip, part, number) for clip in clips for part in clip.parts for number in range(len(clip))]
    with ddpkit.together("check the test frames"):
        for clip, part, number in frames[ddpkit.get_rank() :: ddpkit.get_world_size()]:
            clip.check_file(part, number, whole=True)
    for clip in clips:
        if is_tiny:
            clip.check_multiple(2, "with tiny_clip")
        if "H" in clip.parts and min(clip.height, clip.width) < WINDOW_OF_SSIM:
            raise UserError(
                f"clip {clip.name} has frames of {clip.width} x {clip.height}, but SSIM averages over {WINDOW_OF_SSIM} "
                f"x {WINDOW_OF_SSIM} pixels: test on larger frames"
            )
    return clips


def try_clips(net: nn.Module, clips: Iterable[Clip], opt: Mapping[str, Any], device: torch.device) -> None:
    """Restore a clip of noise of each size that clips are cut into, so that what would fail in a test fails now."""
    val = opt["val"]
    most = val["num_frame_testing"], val["size_patch_testing"], val["size_patch_testing"]
    wholes = [(len(clip), *clip.shapes["L"][:2]) for clip in clips]
    sizes = {tuple(min(size, limit or size) for size, limit in zip(whole, most, strict=True)) for whole in wholes}
    for frames, height, width in sorted(sizes):
        noise = {"L": torch.randint(256, (frames, 3, height, width), dtype=torch.uint8)}
        if has_spikes(opt):
            noise["S"] = torch.randint(2, (frames, WINDOW, height // 2, width // 2), dtype=torch.uint8)
        with trying(net):
            restore(net, noise, opt, device)


def test(
    net: nn.Module, clips: list[Clip], opt: Mapping[str, Any], device: torch.device, images: Path, label: str
) -> Report:
    """Restore and score every clip, each on one rank; all ranks get the exact result. Collective.

    In `images`, `<clip>/<label>.png` shows one frame blurred, restored and sharp. With `save_img`, or without sharp
    frames, `<clip>/<frame>_<label>.png` holds each restored frame, and `<clip>/<label>.mp4` a film.
    """
    ddpkit.sync_buffers(net)  # each rank has its own statistics of batches
    net = ddpkit.unwrap_model(net)  # ranks have different numbers of clips, and DDP's forward may wait
    mine = list(ddpkit.DistributedEvalSampler(clips))
    tiles = [count_tiles(len(clip), *clip.shapes["L"][:2], opt) for clip in clips]
    bar = tqdm(total=sum(tiles[i] for i in mine), desc="test", unit="tile", leave=False, disable=hides_bar())
    with bar, evaluating(net):
        found = [_test_clip(net, clips[i], opt, device, images, label, bar) for i in mine]
    results = ddpkit.gather_exact(found, mine, len(clips))
    names = [clip.name for clip in clips]
    frames, pictures = ({name: result[i] for name, result in zip(names, results, strict=True)} for i in (0, 1))
    return Report(frames, pictures)


def tell(report: Report, folder: Path, step: int, epoch: int = 0) -> dict[str, float]:
    """Log a report as the original does and save it; return the averages by TensorBoard tag. Collective."""
    if not any(report.frames.values()):
        log.info("restored %d clips: %s", len(report.frames), folder / "images")
        return {}
    line = "PSNR: {psnr:.2f} dB; SSIM: {ssim:.4f}; PSNR_Y: {psnr_y:.2f} dB; SSIM_Y: {ssim_y:.4f}"
    for number, clip in enumerate(report.frames, 1):
        scores = report.clip(clip)["restored"]
        log.info(f"Testing {clip:20s} ({number:2d}/{len(report.frames)}) - {line.format(**scores)}")
    average = report.mean()["restored"]
    log.info(f"<epoch:{epoch:3d}, iter:{step:8,d}> Average {line.format(**average)}")
    log.info("%s", report.table())
    ddpkit.run_on_main(_write_scores, folder, report, step)
    return {f"test/{name}": value for name, value in average.items()}


@user_error("cannot write the scores", OSError)
def _write_scores(folder: Path, report: Report, step: int) -> None:
    """Write a report to test.json, by clip and by frame, and to test.csv, one row for each score."""
    clips = {name: report.clip(name) for name in report.frames}
    content = {"iter": step, "mean": report.mean(), "clips": clips, "frames": report.frames}
    valid = json.loads(json.dumps(content), parse_constant=lambda infinite: None)  # the PSNR of equal frames
    (folder / "test.json").write_text(json.dumps(valid, indent=2) + "\n")
    with open(folder / "test.csv", "w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["clip", "frame", "what", *report.mean()["restored"]])
        for clip, frames in report.frames.items():
            for frame, scores in frames.items():
                rows.writerows([clip, frame, what, *values.values()] for what, values in scores.items())


def _test_clip(
    net: nn.Module, clip: Clip, opt: Mapping[str, Any], device: torch.device, images: Path, label: str, bar: tqdm
) -> tuple[Frames, Picture]:
    begun = time.perf_counter()
    parts = {part: torch.from_numpy(clip.stack(part)) for part in clip.parts}
    restored = restore(net, parts, opt, device, bar.update)
    folder, middle = images / clip.name, len(clip) // 2
    numbers = [middle] if opt["val"]["center_frame_only"] else range(len(clip))
    if "H" not in parts:
        numbers = []
    scores: Frames = {}
    for number in numbers:
        shown = _show(parts, restored, number, device)
        sharp = shown.pop("sharp")
        scores[clip.names[number]] = {what: measure(frame, sharp) for what, frame in shown.items()}

    def picture(number: int) -> Picture:
        shown = _show(parts, restored, number, device)
        shown.pop("injection", None)
        return strip({what: _pixels(frame) for what, frame in shown.items()})

    image = picture(middle)
    save(folder / f"{label}.png", image)
    if opt["val"]["save_img"] or "H" not in parts:
        for number, name in enumerate(clip.names):
            save(folder / f"{name}_{label}.png", _pixels(restored[number]))
        save_film(folder / f"{label}.mp4", map(picture, range(len(clip))))
    log.info("tested %s in %.1f s", clip.name, time.perf_counter() - begun)  # progress, where there is no terminal
    return scores, np.asarray(Image.fromarray(image).reduce(-(-image.shape[1] // WIDEST)))


def _show(parts: Mapping[str, Tensor], restored: Tensor, number: int, device: torch.device) -> dict[str, Tensor]:
    """Return one frame in each version, the sharp one last if there is one, all of the same size, in [0, 1]."""
    frame = as_float({part: values[number : number + 1] for part, values in parts.items()}, device)
    blurred = frame["L"]
    if blurred.shape[-2:] != restored.shape[-2:]:
        blurred = F.interpolate(blurred, restored.shape[-2:], mode="bicubic")
    shown = {"blurred": blurred[0]}
    if "S" in frame:
        shown["injection"] = inject_detail(blurred[None], frame["S"][None])[0, 0]
    shown["restored"] = restored[number].to(device)
    if "H" in frame:
        shown["sharp"] = frame["H"][0]
    return shown


def _pixels(frame: Tensor) -> NDArray[np.uint8]:
    return as_image(frame).byte().permute(1, 2, 0).cpu().numpy()


def strip(frames: Mapping[str, Picture]) -> Picture:
    """Join labelled pictures of one size, (height, width, 3), side by side."""
    return np.concatenate([_labelled(frame, label) for label, frame in frames.items()], 1)


def save(path: Path, picture: Picture) -> None:
    with user_error(f"cannot write pictures to {path.parent}", OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture).save(path)


def save_film(path: Path, pictures: Iterable[Picture]) -> None:
    """Write pictures of one size as a film that browsers play; odd sizes lose a row or column."""
    import av

    with user_error(f"cannot write {path}", OSError), av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", RATE)
        stream.pix_fmt = "yuv420p"
        for number, picture in enumerate(pictures):
            picture = picture[: picture.shape[0] // 2 * 2, : picture.shape[1] // 2 * 2]
            if number == 0:
                stream.height, stream.width, _ = picture.shape
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())


def _labelled(frame: Picture, label: str) -> Picture:
    height = max(10, frame.shape[0] // 24)
    image = Image.fromarray(frame)
    draw = ImageDraw.Draw(image)
    font = ImageFont.load_default(height)
    place = (height // 2, height // 4)
    draw.rectangle(draw.textbbox(place, label, font), fill="black")
    draw.text(place, label, "white", font)
    return np.asarray(image)


def measure(frame: Tensor, sharp: Tensor) -> dict[str, float]:
    """Score a frame, (3, height, width) in [0, 1], after rounding it to bytes as image files do."""
    one, other = as_image(frame), as_image(sharp)
    y, other_y = luminance(one), luminance(other)
    scores = {"psnr": psnr(one, other), "ssim": ssim(one, other)}
    return scores | {"psnr_y": psnr(y, other_y), "ssim_y": ssim(y, other_y)}


def as_image(frames: Tensor) -> Tensor:
    """Round frames in [0, 1] to integers in [0, 255], as floats, as an image file would."""
    return (frames.clamp(0, 1) * 255).round().double()


def luminance(frame: Tensor) -> Tensor:
    """Return Y of ITU-R BT.601, (1, height, width) in [16, 235], of a frame (3, height, width) in [0, 255]."""
    red, green, blue = frame
    return ((65.481 * red + 128.553 * green + 24.966 * blue) / 255 + 16)[None]


def psnr(one: Tensor, other: Tensor) -> float:
    """Return the peak signal-to-noise ratio in dB of two images in [0, 255]; infinite if they are equal."""
    error = (one - other).square().mean().item()
    return 10 * math.log10(255**2 / error) if error else math.inf


def ssim(one: Tensor, other: Tensor) -> float:
    """Return the SSIM of two images in [0, 255], with the window of Wang et al. 2004: Gaussian, sigma 1.5."""
    images = one.cpu().numpy(), other.cpu().numpy()
    window = {"gaussian_weights": True, "sigma": 1.5, "use_sample_covariance": False}
    return float(structural_similarity(*images, channel_axis=0, data_range=255, **window))
