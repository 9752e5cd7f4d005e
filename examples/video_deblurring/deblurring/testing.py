"""Tests a network on whole clips, which are spread over the ranks, next to what needs no training."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from shared.program import user_error
from torch import Tensor, nn
from tqdm import tqdm

import ddpkit
from deblurring.data import Clip
from deblurring.metrics import NAMES, as_image, measure
from deblurring.networks import as_float, inject_detail, restore

Scores = dict[str, float]
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Report:
    """Scores by clip, in the order of the clips; each maps `metrics.NAMES` to the mean over the clip's frames."""

    clips: dict[str, dict[str, Scores]]  # by clip, by what was scored: "blurred", "injection" with spikes, "restored"

    def mean(self, what: str) -> Scores:
        """The mean over the clips, each of which counts the same, as in the original."""
        rows = [scores[what] for scores in self.clips.values()]
        return {name: sum(row[name] for row in rows) / len(rows) for name in NAMES}

    def table(self) -> str:
        """PSNR in dB and SSIM of every clip, in Markdown."""
        kinds = list(next(iter(self.clips.values())))
        heads = ["clip", *(f"{kind} PSNR / SSIM" for kind in kinds), *(f"gain over {kind}" for kind in kinds[:-1])]
        lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
        for name, scores in {**self.clips, "mean": {kind: self.mean(kind) for kind in kinds}}.items():
            cells = [f"{scores[kind]['psnr']:.2f} / {scores[kind]['ssim']:.4f}" for kind in kinds]
            cells += [f"{scores['restored']['psnr'] - scores[kind]['psnr']:+.2f} dB" for kind in kinds[:-1]]
            lines.append(f"| {' | '.join([name, *cells])} |")
        return "\n".join(lines)


def test(
    net: nn.Module,
    clips: list[Clip],
    val: Mapping[str, Any],
    device: torch.device,
    images: Path,
    label: str,
) -> Report:
    """Restores and scores every clip, each on one rank; all get the exact result. Collective.

    Args:
        net: The network, wrapped or not.
        clips: The test set, the same on every rank.
        val: The `val` section of the options.
        device: This rank's.
        images: Folder for pictures: `<clip>/<label>.png` shows a frame blurred, restored and sharp; with `save_img`
            `<clip>/<frame>_<label>.png` is each restored frame.
        label: What to call them.
    """
    net = ddpkit.unwrap_model(net).eval()  # ranks have different numbers of clips, and DDP's forward may wait
    mine = list(ddpkit.DistributedEvalSampler(clips))
    bar = tqdm(mine, "test", unit="clip", leave=False, disable=None if ddpkit.is_main_process() else True)
    found = [_test_clip(net, clips[i], val, device, images, label) for i in bar]
    net.train()
    results = ddpkit.gather_exact(found, mine, len(clips))
    return Report({clip.name: scores for clip, scores in zip(clips, results, strict=True)})


def tell(report: Report, here: str) -> dict[str, float]:
    """Logs a report in the original's words; returns the averages by TensorBoard tag."""
    line = "PSNR: {psnr:.2f} dB; SSIM: {ssim:.4f}; PSNR_Y: {psnr_y:.2f} dB; SSIM_Y: {ssim_y:.4f}"
    for number, (clip, scores) in enumerate(report.clips.items(), 1):
        log.info(f"Testing {clip:20s} ({number:2d}/{len(report.clips)}) - {line.format(**scores['restored'])}")
    average = report.mean("restored")
    log.info(f"{here}> Average {line.format(**average)}")
    log.info("%s", report.table())
    return {f"test/{name}": value for name, value in average.items()}


@user_error("cannot write the scores", OSError)
def write_scores(path: Path, report: Report, step: int) -> None:
    """Leaves a report for other programs to read."""
    path.write_text(json.dumps({"iter": step, "clips": report.clips}, indent=2) + "\n")


def _test_clip(
    net: nn.Module, clip: Clip, val: Mapping[str, Any], device: torch.device, images: Path, label: str
) -> dict[str, Scores]:
    batch = as_float({part: torch.from_numpy(clip.stack(part)) for part in clip.parts}, device)
    frames = {"blurred": batch["L"]}
    if "S" in batch:
        frames["injection"] = inject_detail(batch["L"][None], batch["S"][None])[0]
    frames["restored"] = restore(net, batch["L"], batch.get("S"), val)
    _draw(images / clip.name, label, frames["blurred"], frames["restored"], batch["H"], val["save_img"])
    means = {what: measure(values, batch["H"]).mean(0).tolist() for what, values in frames.items()}
    return {what: dict(zip(NAMES, row, strict=True)) for what, row in means.items()}


def _draw(folder: Path, label: str, blurred: Tensor, restored: Tensor, sharp: Tensor, every_frame: bool) -> None:
    middle = len(sharp) // 2
    strip = np.concatenate([_pixels(frames[middle]) for frames in (blurred, restored, sharp)], 1)
    with user_error(f"cannot write pictures to {folder}", OSError):
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(strip).save(folder / f"{label}.png")
        for number, frame in enumerate(restored if every_frame else ()):
            Image.fromarray(_pixels(frame)).save(folder / f"{number:06d}_{label}.png")


def _pixels(frame: Tensor) -> NDArray[np.uint8]:
    return as_image(frame).byte().permute(1, 2, 0).cpu().numpy()
