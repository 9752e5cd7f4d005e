"""How strong the snakes trainer's agents become: trains with several seeds, then lets each best model play.

    python tests/benchmarks/snakes_strength.py --seeds 1 2 3 -- --total_episodes 20000
    python tests/benchmarks/snakes_strength.py --distil -- --total_episodes 8000

What follows `--` goes to the trainer. Prints a Markdown table: for each training seed the seconds that training took,
and the win rates of its best model in games that it was not chosen by, on both sides, against every scripted player and
some that no run has met. The model plays without its search, and with it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "snakes_ddpg"))

from player.search import DEPTH, load_player
from snakes import runs
from snakes.evaluation import play_games
from snakes.opponents import LADDER, OPPONENTS
from snakes_strangers import STRANGERS

PROGRAMS = Path(runs.__file__).parents[1] / "rl_trainer"
JUDGES = {name: OPPONENTS[name] for name in LADDER} | STRANGERS
GAMES_SEED = 12345  # neither that of training nor that of its evaluations


def run(ranks: int, program: str, *arguments: str) -> float:
    """Runs a program on some ranks; the seconds that it took."""
    start = time.monotonic()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    done = subprocess.run([*command, str(PROGRAMS / program), *arguments], capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return time.monotonic() - start


def judge(name: str, model: Path, depth: int, games: int) -> None:
    """Prints a row: the win rates of a model against each player."""
    policy = load_player(model, depth)
    results = [play_games(policy, player, games, seed=GAMES_SEED) for player in JUDGES.values()]
    rates = " | ".join(f"{result.win_rate:.3f} ± {result.standard_error:.3f}" for result in results)
    print(f"| {name} | {rates} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--seeds", type=int, nargs="+", default=[1, 2, 3], help="of training")
    add("--ranks", type=int, default=2, help="processes")
    add("--games", type=int, default=400, help="per opponent, half of them on either side")
    add("--distil", action="store_true", help="judge what distil.py makes of the best model")
    add("--runs_folder", type=Path, default=runs.ROOT, help="where the runs' folders are")
    add("flags", nargs="*", help="of the trainer, after --")
    args = parser.parse_args()

    print(f"| seed | {' | '.join(JUDGES)} |\n|{' --- |' * (1 + len(JUDGES))}")
    for seed in tqdm(args.seeds, unit="seed", disable=None):
        seconds = run(args.ranks, "main_ddp.py", f"--seed={seed}", f"--runs_folder={args.runs_folder}", *args.flags)
        folder = runs.find_run("latest", args.runs_folder)
        total = json.loads((folder / "summary.json").read_text())["total"]
        if args.distil:
            where = f"--seed={seed}", f"--runs_folder={args.runs_folder}"
            seconds += run(args.ranks, "distil.py", str(folder), *where)
        model = runs.find_model(folder)
        judge(f"{seed}, without search", model, 0, args.games)
        judge(f"{seed}, {seconds:.0f} s, {total['episodes']} episodes", model, DEPTH, args.games)


if __name__ == "__main__":
    main()
