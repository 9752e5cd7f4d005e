"""How fast the snakes trainer trains, where its time goes and what more ranks bring, by short runs of the real program.

Runs on different numbers of ranks take turns, so that all see the same others on the machine. Every rank has one thread
and the same number of boards and rows per step, whatever their number; logging and evaluation are on, as often as by
default. Printed are medians over the rounds as a Markdown table, the speed-ups being those within a round.

    python tests/benchmarks/snakes_training.py
    python tests/benchmarks/snakes_training.py --rounds 5 --episodes 8000 --ranks 1 2 4
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "snakes_ddpg"
PUBLIC = 0.64  # episodes/s of the public trainer, on one core
STEPS = 200  # of an episode
PARTS = ("play", "sample", "update", "exchange", "evaluate", "save")


def train(ranks: int, args: argparse.Namespace) -> dict:
    """The summary that one run of the trainer leaves."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        command += [str(EXAMPLE / "rl_trainer" / "main_ddp.py"), f"--runs_folder={folder}"]
        command += [f"--boards={args.boards * ranks}", f"--batch_size={args.batch_size}"]
        command += [f"--total_episodes={args.episodes * ranks}", *["--bind_cores"] * args.bind_cores]
        env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        ended = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if ended.returncode != 0:
            sys.exit(f"{' '.join(command)} ended with status {ended.returncode}:\n{ended.stdout}")
        (summary,) = Path(folder).glob("*/summary.json")
        return json.loads(summary.read_text())


def speeds(summary: dict) -> tuple[float, float]:
    """Episodes/s, by their steps, since the first ones of the boards are shorter and not counted; and samples/s."""
    return summary["per_second"]["environment_steps"] / STEPS, summary["per_second"]["samples"]


def row(runs: list[dict], base: list[dict]) -> list[str]:
    """The table's row for the runs on one number of ranks; `base`: those on the first number, round by round."""
    episodes, samples = (statistics.median(values) for values in zip(*map(speeds, runs), strict=True))
    speed_up = statistics.median(speeds(run)[1] / speeds(first)[1] for run, first in zip(runs, base, strict=True))
    memory = statistics.median(max(run["memory_mib_by_rank"]) for run in runs)
    shares = [statistics.median(run["share_of_time"][part] for run in runs) for part in PARTS]
    return [
        f"{runs[0]['ranks']}",
        f"{episodes:.0f}",
        f"{episodes / PUBLIC:.0f}",
        f"{samples:,.0f}",
        f"{speed_up:.2f}",
        f"{memory:.0f}",
        *(f"{share:.1%}" for share in shares),
    ]


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="numbers of ranks to compare")
    parser.add_argument("--rounds", type=int, default=5, help="runs on each number of ranks")
    parser.add_argument("--episodes", type=int, default=4000, help="of a run, per rank")
    parser.add_argument("--boards", type=int, default=512, help="played at once, per rank")
    parser.add_argument("--batch_size", type=int, default=4096, help="rows per optimiser step, per rank")
    parser.add_argument("--bind_cores", action="store_true", help="give each rank a core of its own")
    args = parser.parse_args()
    results: dict[int, list[dict]] = {ranks: [] for ranks in args.ranks}
    for number in range(args.rounds):
        for ranks, runs in results.items():
            runs.append(train(ranks, args))
            episodes, samples = speeds(runs[-1])
            news = f"ranks {ranks}: {episodes:.1f} episodes/s, {samples:,.0f} samples/s"
            print(f"round {number + 1} of {args.rounds}, {news}", file=sys.stderr, flush=True)
    first = args.ranks[0]
    heads = ["ranks", "episodes/s", f"× {PUBLIC}/s", "samples/s", f"× {first} rank", "MiB per rank", *PARTS]
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for runs in results.values():
        print(f"| {' | '.join(row(runs, results[first]))} |")


if __name__ == "__main__":
    main()
