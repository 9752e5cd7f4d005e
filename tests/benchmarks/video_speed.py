"""How many images per second the video trainer trains on, on different numbers of ranks, by short runs of the program.

Runs take turns, so that all see the same others on the machine. Every rank has one thread and the same batch, whatever
their number. An image is one crop of one frame; the rate is what the trainer logs, of which a run's first line is left
out, since starting up counts in it. Printed are medians over the rounds as a Markdown table, the speed-ups being those
within a round.

    python tests/benchmarks/video_speed.py
    python tests/benchmarks/video_speed.py --rounds 9 --ranks 1 2 4
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
import tempfile

import by_ranks
from video_runs import EXAMPLE, read_options, train


def rate(ranks: int, args: argparse.Namespace) -> float:
    """Images per second of all ranks, in one run."""
    opt = read_options("006_train_vrt_videodeblurring_gopro_rgbspike.json")
    opt["train"] |= {"total_iter": args.iterations, "checkpoint_print": args.iterations // 5}
    with tempfile.TemporaryDirectory() as folder:
        said = train(opt, folder, ranks)
    return statistics.median(float(found) for found in re.findall(r"images/s: ([\d.]+)", said)[1:])


if __name__ == "__main__":
    subprocess.run([sys.executable, str(EXAMPLE / "prepare.py")], check=True, stdout=subprocess.DEVNULL)
    parser = argparse.ArgumentParser()
    parser.add_argument("--iterations", type=int, default=150, help="of a run, at least 10")
    by_ranks.compare(__doc__, "images/s", rate, parser)
