"""How strong the snakes trainer's agents become: trains with several seeds, then lets each best model play.

    python tests/benchmarks/snakes_strength.py --seeds 1 2 3 --curve curve.png -- --total_episodes 20000

What follows `--` goes to the trainer. The models play with their search. Prints a Markdown table: for each
training seed the seconds that training took, and the win rates of its best model in games that it was not chosen by, on
both sides, against every scripted player.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import matplotlib.pyplot as plt
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "snakes_ddpg"))

from snakes import runs
from snakes.evaluation import play_games
from snakes.opponents import OPPONENTS
from snakes.search import load_player

TRAINER = Path(runs.__file__).parents[1] / "rl_trainer" / "main_ddp.py"
GAMES_SEED = 12345  # neither that of training nor that of its evaluations


def train(seed: int, ranks: int, folder: Path, flags: list[str]) -> tuple[Path, float]:
    """Trains once; the run's folder and the seconds that the whole command took."""
    start = time.monotonic()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command += [str(TRAINER), f"--seed={seed}", f"--runs_folder={folder}", *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return runs.find_run("latest", folder), time.monotonic() - start


def draw_curve(found: dict[int, Path], path: Path) -> None:
    """Mean win rate over the evaluation's opponents during training, without search, a line for each seed."""
    figure, axes = plt.subplots(figsize=(7, 3.5), layout="constrained")
    for seed, run in found.items():
        events = EventAccumulator(str(run)).Reload().Scalars("evaluation/win_rate")
        axes.plot([event.step for event in events], [event.value for event in events], marker=".", label=f"seed {seed}")
    axes.set(xlabel="episodes, of all ranks", ylabel="mean win rate over the ladder, without search", ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--seeds", type=int, nargs="+", default=[1, 2, 3], help="of training")
    add("--ranks", type=int, default=2, help="processes")
    add("--games", type=int, default=400, help="per opponent, half of them on either side")
    add("--runs_folder", type=Path, default=runs.ROOT, help="where the runs' folders are")
    add("--curve", type=Path, metavar="FILE", help="PNG of the win rates during training")
    add("flags", nargs="*", help="of the trainer, after --")
    args = parser.parse_args()

    print(f"| seed | training | {' | '.join(OPPONENTS)} |\n|{' --- |' * (2 + len(OPPONENTS))}")
    found = {}
    for seed in tqdm(args.seeds, unit="seed", disable=None):
        found[seed], seconds = train(seed, args.ranks, args.runs_folder, args.flags)
        policy = load_player(runs.find_model(found[seed].name, root=args.runs_folder))
        results = [play_games(policy, player, args.games, seed=GAMES_SEED) for player in OPPONENTS.values()]
        rates = " | ".join(f"{result.win_rate:.3f} ± {result.standard_error:.3f}" for result in results)
        total = json.loads((found[seed] / "summary.json").read_text())["total"]
        print(f"| {seed} | {seconds:.0f} s, {total['episodes']} episodes | {rates} |", flush=True)
    if args.curve:
        draw_curve(found, args.curve)


if __name__ == "__main__":
    main()
