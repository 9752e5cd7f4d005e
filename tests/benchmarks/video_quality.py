"""What the video trainer reaches and how long that takes, by whole runs of the real programs.

For each seed it trains with spikes and, unless `--only` says otherwise, without, on two ranks of one thread each;
start, tests and checkpoints are part of the time. Printed is a Markdown table: PSNR of each test clip, and gains.

    python tests/benchmarks/video_quality.py
    python tests/benchmarks/video_quality.py --only rgbspike --keep runs/video
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import video_runs
from video_runs import EXAMPLE

NAME = "006_train_vrt_videodeblurring_gopro"
KINDS = {"rgbspike": f"{NAME}_rgbspike", "rgb": NAME}
GOAL = ("bikes4", "bikes5")


def train(kind: str, seed: int, ranks: int, root: Path) -> tuple[dict, float]:
    """The scores that a run leaves, by clip, and its seconds."""
    opt = video_runs.read_options(f"{KINDS[kind]}.json")
    opt["task"], opt["train"]["manual_seed"] = f"{kind}_{seed}", seed
    begun = time.monotonic()
    video_runs.train(opt, root, ranks)
    seconds = time.monotonic() - begun
    return json.loads((root / f"{kind}_{seed}" / "test.json").read_text())["clips"], seconds


def row(kind: str, seed: int, clips: dict, seconds: float) -> list[str]:
    cells = [kind, f"{seed}", f"{seconds:.0f}"]
    cells += [f"{scores['restored']['psnr']:.2f} / {scores['restored']['ssim']:.4f}" for scores in clips.values()]
    for base in ("blurred", "injection"):
        gains = [clips[clip]["restored"]["psnr"] - clips[clip][base]["psnr"] for clip in GOAL if base in clips[clip]]
        cells.append(f"{sum(gains) / len(gains):+.2f}" if gains else "")
    return cells


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", choices=list(KINDS), help="train with spikes only, or without only")
    parser.add_argument("--keep", type=Path, help="folder for the runs; by default they are deleted")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        root = args.keep or Path(scratch)
        root.mkdir(parents=True, exist_ok=True)
        subprocess.run([sys.executable, str(EXAMPLE / "prepare.py")], check=True, stdout=subprocess.DEVNULL)
        rows = []
        for kind in [args.only] if args.only else KINDS:
            for seed in args.seeds:
                clips, seconds = train(kind, seed, args.ranks, root)
                if not rows:
                    for base in ("blurred", "injection"):
                        if all(base in scores for scores in clips.values()):
                            before = [f"{s[base]['psnr']:.2f} / {s[base]['ssim']:.4f}" for s in clips.values()]
                            rows.append([base, "", "", *before, "", ""])
                rows.append(row(kind, seed, clips, seconds))
                print(" ".join(rows[-1]), file=sys.stderr, flush=True)
    heads = ["input", "seed", "seconds", *clips, "bikes: gain over blurred, dB", "bikes: gain over injection, dB"]
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for cells in rows:
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
