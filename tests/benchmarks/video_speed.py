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

from video_runs import EXAMPLE, read_options, train


def rate(ranks: int, iterations: int) -> float:
    """Images per second of all ranks, in one run."""
    opt = read_options("006_train_vrt_videodeblurring_gopro_rgbspike.json")
    opt["train"] |= {"total_iter": iterations, "checkpoint_print": iterations // 5}
    with tempfile.TemporaryDirectory() as folder:
        said = train(opt, folder, ranks)
    return statistics.median(float(found) for found in re.findall(r"images/s: ([\d.]+)", said)[1:])


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="numbers of ranks to compare")
    parser.add_argument("--rounds", type=int, default=5, help="runs on each number of ranks")
    parser.add_argument("--iterations", type=int, default=150, help="of a run, at least 10")
    args = parser.parse_args()
    subprocess.run([sys.executable, str(EXAMPLE / "prepare.py")], check=True, stdout=subprocess.DEVNULL)
    rates: dict[int, list[float]] = {ranks: [] for ranks in args.ranks}
    for number in range(args.rounds):
        for ranks, found in rates.items():
            found.append(rate(ranks, args.iterations))
            print(f"round {number + 1} of {args.rounds}, ranks {ranks}: {found[-1]:.1f}", file=sys.stderr, flush=True)
    first = args.ranks[0]
    print(f"| ranks | images/s | × {first} rank |\n|---|---|---|")
    for ranks, found in rates.items():
        speed_up = statistics.median(one / base for one, base in zip(found, rates[first], strict=True))
        print(f"| {ranks} | {statistics.median(found):.1f} | {speed_up:.2f} |")


if __name__ == "__main__":
    main()
