"""How often the robot's policy succeeds, by the real programs: demonstrations, training, rollouts on unseen seeds.

Collects the demonstrations once; then, for each training seed and number of ranks with the same batch of all ranks
together, trains on ranks of one thread each and lets EMA and raw weights play. Chance and the expert play once. Printed
is a Markdown table; training times are those of the whole program, start and checkpoints included.

    python tests/benchmarks/robot_success.py
    python tests/benchmarks/robot_success.py --ranks 1 2 --seeds 0 --epochs 6
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENV = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}


def run(ranks: int, module: str, *arguments: str) -> str:
    """Runs one of the example's programs; what it printed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command += ["-m", f"robot.{module}", *arguments]
    folder = ROOT / "examples" / "diffusion_policy"
    ended = subprocess.run(command, env=ENV, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if ended.returncode != 0:
        sys.exit(f"{' '.join(command)} ended with status {ended.returncode}:\n{ended.stdout}")
    return ended.stdout


def call(ranks: int, module: str, *arguments: str) -> float:
    """Runs one of the example's programs; seconds that it took."""
    start = time.monotonic()
    run(ranks, module, *arguments)
    return time.monotonic() - start


def play(checkpoint: Path, episodes: int, *players: str) -> dict[str, str]:
    """Success with its standard error, by player."""
    scores = checkpoint.with_name("scores.json")
    call(2, "rollout", str(checkpoint), "--episodes", f"{episodes}", "--json", str(scores), "--players", *players)
    found = json.loads(scores.read_text())
    return {name: f"{score['success_rate']:.2f} ± {score['standard_error']:.2f}" for name, score in found.items()}


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2], help="numbers of ranks to train on")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of training")
    parser.add_argument("--epochs", type=int, default=20, help="of 250 optimiser steps")
    parser.add_argument("--demonstrations", type=int, default=200, help="episodes to learn from")
    parser.add_argument("--episodes", type=int, default=100, help="episodes of each evaluation")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        data, runs = Path(scratch, "data"), Path(scratch, "runs")
        seconds = call(2, "collect", "--folder", str(data), "--episodes", f"{args.demonstrations}")
        print(f"{args.demonstrations} demonstrations in {seconds:.0f} s", file=sys.stderr, flush=True)
        print("| ranks | seed | optimiser steps | training | EMA | raw weights |\n|---|---|---|---|---|---|")
        for ranks in args.ranks:
            for seed in args.seeds:
                name = f"ranks{ranks}seed{seed}"
                settings = [f"train.data_path={data}", f"train.output_dir={runs}", f"experiment.name={name}"]
                settings += ["train.keep_batch_size=global", f"train.seed={seed}", f"train.num_epochs={args.epochs}"]
                seconds = call(ranks, "train", *settings, "experiment.rollout.enabled=false")
                (checkpoint,) = runs.glob(f"{name}/*/last.pth")
                scores = play(checkpoint, args.episodes, "ema", "raw")
                row = f"| {ranks} | {seed} | {250 * args.epochs} | {seconds:.0f} s |"
                print(row, " | ".join(scores.values()), "|", flush=True)
        scores = play(checkpoint, args.episodes, "random", "expert")
        print(", ".join(f"{name} {score}" for name, score in scores.items()))


if __name__ == "__main__":
    main()
