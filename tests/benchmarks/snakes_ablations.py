"""What each part of the snakes trainer brings: trains with several seeds without it, and lets the models play.

    python tests/benchmarks/snakes_ablations.py
    python tests/benchmarks/snakes_ablations.py --only "as it is" "no target networks" --processes 2

Prints a Markdown table: the win rates of the best models of all seeds against each player, with the 95 % interval of so
many games; and their mean over the players, with its least and greatest value among the seeds. The models play without
search, unless a row says otherwise.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import runpy
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "snakes_ddpg"))

from player import search
from snakes import runs
from snakes.collector import Collector
from snakes.evaluation import play_games
from snakes.opponents import OPPONENTS
from snakes_strangers import voronoi

PROGRAM = Path(runs.__file__).parents[1] / "rl_trainer" / "main.py"
JUDGES = {name: OPPONENTS[name] for name in ("greedy", "foresighted", "territory")} | {"voronoi": voronoi}
GAMES_SEED = 12345  # neither that of training nor that of its evaluations


def start_together() -> None:
    make = Collector.__init__

    def make_together(collector: Collector, *args: object, **options: object) -> None:
        make(collector, *args, **options)
        collector.game.boards.times[:] = 0
        collector._whole[:] = True

    Collector.__init__ = make_together


# the public guides' flags, which set the batch, and so the boards
GUIDE_A = "--batch_size 128 --a_lr 3e-4 --c_lr 3e-4 --gamma 0.99 --tau 0.01 --epsilon 0.5 --epsilon_speed 0.9995"
GUIDE_C = "--batch_size 64 --a_lr 1e-4 --c_lr 1e-4 --gamma 0.95 --tau 0.001 --epsilon 0.5 --epsilon_speed 0.99998"
# constants of the search by the rows whose models play with it
SEARCHES: dict[str, dict[str, Any]] = {
    "search": {},
    "search, rivals take their first way": {"LIKELY": 1.0},
    "search, and no snake counts as trapped": {"LIKELY": 1.0, "TRAP": 0.0},
}
# flags of the trainer, or a change of its program, by what the row is called
ABLATIONS: dict[str, str | Callable[[], None]] = {
    "as it is": "",
    "no target networks": "--tau 1",
    "territory as the only opponent": "--opponent territory",
    "random moves, too": "--epsilon 0.2 --epsilon_speed 0.999999",
    "all boards start together": start_together,
    "guide A": GUIDE_A,
    "guide C": GUIDE_C,
    **dict.fromkeys(SEARCHES, ""),
}


def train(task: tuple[str, int, argparse.Namespace]) -> list[float]:
    """Trains with a part changed, on one process; the best model's win rates against each player."""
    name, seed, args = task
    change = ABLATIONS[name]
    flags = []
    if isinstance(change, str):
        flags = change.split()
    else:
        change()
    logging.disable(logging.INFO)
    with tempfile.TemporaryDirectory() as folder:
        sys.argv = ["main.py", f"--seed={seed}", f"--runs_folder={folder}", f"--total_episodes={args.episodes}"]
        sys.argv += [f"--eval_interval={args.episodes // 4}", *flags]
        try:
            runpy.run_path(str(PROGRAM), run_name="__main__")
        except SystemExit as end:
            if end.code:
                raise RuntimeError(f"{name}, seed {seed}: the trainer ended with status {end.code}") from end
        depth = search.DEPTH if name in SEARCHES else 0
        policy = search.load_player(runs.find_model("latest", root=Path(folder)), depth)
    vars(search).update(SEARCHES.get(name, {}))
    return [play_games(policy, player, args.games, seed=GAMES_SEED).win_rate for player in JUDGES.values()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=ABLATIONS, default=list(ABLATIONS), help="rows of the table")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="of training")
    parser.add_argument("--episodes", type=int, default=6000, help="of each run")
    parser.add_argument("--games", type=int, default=400, help="of a model against each player, on both sides")
    parser.add_argument("--processes", type=int, default=2, help="runs at once")
    args = parser.parse_args()

    tasks = [(name, seed, args) for name in args.only for seed in args.seeds]
    print(f"| | {' | '.join(JUDGES)} | mean |\n|{' --- |' * (2 + len(JUDGES))}")
    found: list[list[float]] = []
    with multiprocessing.get_context("spawn").Pool(args.processes, maxtasksperchild=1) as pool:
        for rates in tqdm(pool.imap(train, tasks), total=len(tasks), unit="run", disable=None):
            found.append(rates)
            if len(found) % len(args.seeds):
                continue
            seeds = np.array(found[-len(args.seeds) :])
            interval = 1.96 * np.sqrt(seeds.mean(0) * (1 - seeds.mean(0)) / (args.games * len(seeds)))
            cells = [f"{rate:.3f} ± {error:.3f}" for rate, error in zip(seeds.mean(0), interval, strict=True)]
            means = seeds.mean(1)
            name = tasks[len(found) - 1][0]
            mean = f"{means.mean():.3f} ({means.min():.3f} to {means.max():.3f})"
            print(f"| {name} | {' | '.join([*cells, mean])} |", flush=True)


if __name__ == "__main__":
    main()
