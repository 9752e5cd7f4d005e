"""Which share of a training step the video trainer waits for data, at 1280 x 720, by short runs of the program.

The frames are made here, as PNG files of smooth noise that take as long to decode as photographs. Compared are frames
that are decoded each time, without and with loading processes, and frames that stay decoded in the file that all ranks
share. A run's first lines, in which that file fills, are printed apart from the last.

    python tests/benchmarks/video_loading.py
    python tests/benchmarks/video_loading.py --ranks 2 --workers 1 --frames 20
"""

from __future__ import annotations

import argparse
import re
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image
from video_runs import read_options, refuse, start

HEIGHT, WIDTH = 720, 1280


def write_frames(root: Path, clips: int, frames: int) -> None:
    """Make sharp and blurred frames of noise at several scales, a little of it at the finest."""
    rng = np.random.default_rng(0)
    for clip in range(clips):
        whole = np.zeros((HEIGHT, WIDTH + 2 * frames, 3), np.float32)
        for size in (80, 20, 5):
            coarse = rng.uniform(0, 80, (HEIGHT // size, whole.shape[1] // size + 1, 3)).astype(np.float32)
            whole += coarse.repeat(size, 0).repeat(size, 1)[:, : whole.shape[1]]
        for number in range(frames):
            sharp = whole[:, 2 * number : 2 * number + WIDTH] + rng.normal(0, 2, (HEIGHT, WIDTH, 3))
            blurred = (sharp + np.roll(sharp, 1, 1) + np.roll(sharp, -1, 1)) / 3
            for part, frame in (("GT", sharp), ("GT_blurred", blurred)):
                folder = root / part / f"{clip:03d}"
                folder.mkdir(parents=True, exist_ok=True)
                Image.fromarray(frame.clip(0, 255).astype(np.uint8)).save(folder / f"{number:06d}.png")


def shares(data: Path, cached: bool, workers: int, args: argparse.Namespace) -> list[tuple[float, float]]:
    """Images per second and the share of waiting, of each line of a run."""
    with tempfile.TemporaryDirectory() as folder:
        opt = read_options("006_train_vrt_videodeblurring_gopro.json")
        for section in opt["datasets"].values():
            section |= {"dataroot_gt": str(data / "GT"), "dataroot_lq": str(data / "GT_blurred"), "cache_data": False}
        opt["datasets"]["train"] |= {
            "cache_data": cached,
            "dataloader_num_workers": workers,
            "gt_size": args.size,
            "meta_info_file": None,
        }
        opt["netG"] |= {"embed_dim": args.channels}
        never = 10 * args.iterations
        opt["train"] |= {"total_iter": never, "checkpoint_print": args.iterations // 5}
        opt["train"] |= {"checkpoint_save": never, "checkpoint_test": never}
        running = start(opt, folder, args.ranks)
        assert running.stdout is not None
        said, found = "", []
        for line in running.stdout:
            said += line
            found += re.findall(r"images/s: ([\d.]+) waits: ([\d.]+)%", line)
            if len(found) == 5:
                running.terminate()
                break
        running.wait()
    if len(found) < 5:
        refuse(running, said)
    return [(float(rate), float(waits)) for rate, waits in found]


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2, help="loading processes per rank, where there are any")
    parser.add_argument("--clips", type=int, default=2)
    parser.add_argument("--frames", type=int, default=10, help="of a clip")
    parser.add_argument("--size", type=int, default=64, help="pixels of a crop's side")
    parser.add_argument("--channels", type=int, default=32, help="of tiny_clip")
    parser.add_argument("--iterations", type=int, default=100, help="of a run, at least 5")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        data = Path(scratch)
        write_frames(data, args.clips, args.frames)
        heads = ["frames", "loading processes", "images/s at first", "waits", "images/s at last", "waits"]
        print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
        for cached, workers in ((False, 0), (False, args.workers), (True, 0), (True, args.workers)):
            first, *_, last = shares(data, cached, workers, args)
            cells = ["kept" if cached else "decoded each time", f"{workers}"]
            cells += [
                f"{number:.1f}{unit}" for pair in (first, last) for number, unit in zip(pair, ("", " %"), strict=True)
            ]
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
