"""Tiny clips in the layout of the GoPro data set, and options for them, for the tests of the video example."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
from deblurring.clips import WINDOW, blur, spike_counts
from PIL import Image

SIZES = {"train": {"a": (6, 32, 48), "b": (4, 40, 32)}, "test": {"x": (4, 24, 32), "y": (3, 32, 24), "z": (5, 24, 24)}}


def real_frames(n: int, height: int, width: int, seed: int) -> np.ndarray:
    """A smooth random texture that moves a pixel or two per frame: (n, height, width, 3), bytes."""
    rng = np.random.default_rng(seed)
    coarse = rng.uniform(0, 255, (height // 4 + 2, width // 4 + 2 + n, 3))
    fine = np.kron(coarse, np.ones((4, 4, 1)))
    fine = (fine + np.roll(fine, 1, 0) + np.roll(fine, 1, 1) + np.roll(fine, 2, 1)) / 4
    return np.stack([fine[2 : height + 2, 2 + i : width + 2 + i] for i in range(n)]).astype(np.uint8)


def write_clips(root: Path) -> Path:
    """Writes clips of (frames, height, width) as in `SIZES`, by split and name."""
    for split, clips in SIZES.items():
        for seed, (name, (frames, height, width)) in enumerate(clips.items()):
            real = real_frames(frames * WINDOW, height, width, seed)
            parts = {"GT": real[WINDOW // 2 :: WINDOW], "GT_blurred": blur(real), "spike": spike_counts(real)}
            for part, values in parts.items():
                folder = root / f"{split}_{part}" / name
                folder.mkdir(parents=True)
                for number, value in enumerate(values):
                    if part == "spike":
                        np.save(folder / f"{number:06d}.npy", value)
                    else:
                        Image.fromarray(value).save(folder / f"{number:06d}.png")
    return root


def write_lmdb(folder: Path, path: Path) -> None:
    """Writes the pictures of folders of clips as KAIR's create_lmdb.py does, encoded, with the list of them."""
    import lmdb

    lines = []
    with lmdb.open(str(path), map_size=2**24) as environment, environment.begin(write=True) as transaction:
        for file in sorted(folder.rglob("*.png")):
            key = file.relative_to(folder).with_suffix("").as_posix()
            with Image.open(file) as image:
                lines.append(f"{key}.png ({image.height},{image.width},3) 1\n")
            transaction.put(key.encode("ascii"), file.read_bytes())
    (path / "meta_info.txt").write_text("".join(lines))


def options(clips: Path, root: Path, **changes: Any) -> dict[str, Any]:
    """Options of a tiny run on such clips; `changes` by key, with __ for the dots."""
    roots = {split: {f"dataroot_{key}": f"{clips}/{split}_{part}" for key, part in PARTS.items()} for split in SIZES}
    opt = copy.deepcopy(BASE)
    opt["path"] = {"root": str(root)}
    for split, data in roots.items():
        opt["datasets"][split] |= data
    for key, value in changes.items():
        *path, name = key.split("__")
        section = opt
        for part in path:
            section = section.setdefault(part, {})
        section[name] = value
    return opt


def write_options(path: Path, opt: dict[str, Any]) -> str:
    path.write_text(json.dumps(opt))
    return str(path)


RGB = {
    f"datasets__{split}__{key}": value
    for split in ("train", "test")
    for key, value in (("dataset_type", f"VideoRecurrent{split.title()}Dataset"), ("dataroot_spike", None))
}
PARTS = {"gt": "GT", "lq": "GT_blurred", "spike": "spike"}
BASE: dict[str, Any] = {
    "task": "tiny",
    "datasets": {
        "train": {
            "dataset_type": "TrainDatasetRGBSpike",
            "num_frame": 3,
            "gt_size": 16,
            "use_hflip": True,
            "use_rot": True,
            "dataloader_batch_size": 6,
            "dataloader_batch_size_is": "global",
        },
        "test": {"dataset_type": "TestDatasetRGBSpike"},
    },
    "netG": {"net_type": "tiny_clip", "embed_dim": 4, "depth": 1},
    "train": {
        "total_iter": 12,
        "manual_seed": 3,
        "E_decay": 0.9,
        "G_lossfn_type": "charbonnier",
        "G_optimizer_type": "adam",
        "G_optimizer_lr": 1e-3,
        "G_optimizer_clipgrad": 1.0,
        "G_scheduler_type": "CosineAnnealingWarmRestarts",
        "G_scheduler_periods": 12,
        "checkpoint_print": 4,
        "checkpoint_save": 5,
        "checkpoint_test": 100,
    },
    "val": {"num_frame_overlapping": 1},
}
