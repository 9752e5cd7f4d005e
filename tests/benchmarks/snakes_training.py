"""How fast the snakes trainer trains and what more ranks bring, by short runs of the real program.

Runs on different numbers of ranks take turns, so that all see the same others on the machine. Every rank has one thread
and the same number of boards and rows per step, whatever their number; logging and evaluation are on, as often as by
default. Printed are medians over the rounds as a Markdown table, the speed-ups being those within a round. As many
runs on one rank each, at once, that never talk to each other show what the machine has to give.

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


def start(ranks: int, args: argparse.Namespace, folder: str) -> subprocess.Popen:
    """One run of the trainer, which leaves its summary below `folder`."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command += [str(EXAMPLE / "rl_trainer" / "main_ddp.py"), f"--runs_folder={folder}"]
    command += [f"--boards={args.boards * ranks}", f"--batch_size={args.batch_size}"]
    command += [f"--total_episodes={args.episodes * ranks}"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    env |= {"MALLOC_TRIM_THRESHOLD_": "1073741824", "MALLOC_MMAP_THRESHOLD_": "33554432"}  # as train_ddp.sh does
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def train(ranks: int, apart: bool, args: argparse.Namespace) -> list[dict]:
    """The summary that one run on `ranks` leaves, or those of as many runs on one, at once and `apart`."""
    with tempfile.TemporaryDirectory() as folder:
        if apart:
            runs = [start(1, args, f"{folder}/{number}") for number in range(ranks)]
        else:
            runs = [start(ranks, args, folder)]
        for run in runs:
            output, _ = run.communicate()
            if run.returncode != 0:
                sys.exit(f"{' '.join(run.args)} ended with status {run.returncode}:\n{output}")
        return [json.loads(path.read_text()) for path in Path(folder).glob("**/summary.json")]


def speeds(summaries: list[dict]) -> tuple[float, float]:
    """Episodes/s, by their steps, since the first ones of the boards are shorter and not counted; and samples/s."""
    found = [summary["per_second"] for summary in summaries]
    return sum(one["environment_steps"] for one in found) / STEPS, sum(one["samples"] for one in found)


def row(name: str, runs: list[list[dict]], base: list[list[dict]]) -> list[str]:
    """The table's row for the runs of one kind; `base`: those of the first kind, round by round."""
    episodes, samples = (statistics.median(values) for values in zip(*map(speeds, runs), strict=True))
    speed_up = statistics.median(speeds(run)[1] / speeds(first)[1] for run, first in zip(runs, base, strict=True))
    memory = statistics.median(max(max(one["memory_mib_by_rank"]) for one in run) for run in runs)
    return [
        name,
        f"{episodes:.0f}",
        f"{episodes / PUBLIC:.0f}",
        f"{samples:,.0f}",
        f"{speed_up:.2f}",
        f"{memory:.0f}",
    ]


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="numbers of ranks to compare")
    parser.add_argument("--rounds", type=int, default=5, help="runs on each number of ranks")
    parser.add_argument("--episodes", type=int, default=4000, help="of a run, per rank")
    parser.add_argument("--boards", type=int, default=512, help="played at once, per rank")
    parser.add_argument("--batch_size", type=int, default=3072, help="rows per optimiser step, per rank")
    args = parser.parse_args()
    kinds = {f"{ranks}": (ranks, False) for ranks in args.ranks}
    kinds |= {f"{ranks} runs on 1 each": (ranks, True) for ranks in args.ranks if ranks > 1}
    results: dict[str, list[list[dict]]] = {name: [] for name in kinds}
    for number in range(args.rounds):
        for name, kind in kinds.items():
            results[name].append(train(*kind, args))
            episodes, samples = speeds(results[name][-1])
            news = f"ranks {name}: {episodes:.1f} episodes/s, {samples:,.0f} samples/s"
            print(f"round {number + 1} of {args.rounds}, {news}", file=sys.stderr, flush=True)
    first = next(iter(results))
    heads = ["ranks", "episodes/s", f"× {PUBLIC}/s", "samples/s", f"× {first} rank", "MiB per rank"]
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for name, runs in results.items():
        print(f"| {' | '.join(row(name, runs, results[first]))} |")


if __name__ == "__main__":
    main()
