"""How many board-steps of the snakes game one core plays in a second: moves, steps and resets of finished boards.

Three loads take turns, so that all see the same others on the machine: random moves for both teams; greedy players in
one team; and these, with the features of the other team computed as well. Printed is the median over the rounds and,
since others may be at work on the machine, the best.

    python tests/benchmarks/snakes_game.py
    python tests/benchmarks/snakes_game.py --boards 256 4096 --rounds 30
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "snakes_ddpg"))

from snakes.features import FEATURES, observe
from snakes.game import Game
from snakes.opponents import OPPONENTS

LOADS = {"random": ("random", False), "greedy": ("greedy", False), "greedy + features": ("greedy", True)}


def play(game: Game, opponent: str, seen: np.ndarray | None, steps: int) -> float:
    """Seconds that some steps take; team A moves at random, the opponent is team B."""
    actions = np.zeros((len(game.done), 6), np.uint8)
    start = time.perf_counter()
    for _ in range(steps):
        if seen is not None:
            observe(game.boards, 0, seen)
        OPPONENTS["random"](game.boards, 0, actions)
        OPPONENTS[opponent](game.boards, 1, actions)
        game.step(actions)
        game.reset(game.done)
    return time.perf_counter() - start


def measure(boards: int, rounds: int) -> dict[str, list[float]]:
    """Millions of board-steps per second, by load and round."""
    game, seen = Game(boards), np.zeros((boards, 3, FEATURES), np.float32)
    steps = max(1, 100_000 // boards)
    speeds: dict[str, list[float]] = {load: [] for load in LOADS}
    for i in range(rounds + 1):
        for load, (opponent, observed) in LOADS.items():
            seconds = play(game, opponent, seen if observed else None, steps)
            if i > 0:  # the first compiles
                speeds[load].append(boards * steps / seconds / 1e6)
    return speeds


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--boards", type=int, nargs="+", default=[256, 1024, 4096], help="side by side")
    parser.add_argument("--rounds", type=int, default=15, help="of about 100,000 board-steps each")
    args = parser.parse_args()
    print(f"{'million board-steps/s':<22} {'boards':>7} {'median':>8} {'best':>8}")
    for boards in args.boards:
        for load, speeds in measure(boards, args.rounds).items():
            print(f"{load:<22} {boards:>7} {statistics.median(speeds):>8.2f} {max(speeds):>8.2f}")


if __name__ == "__main__":
    main()
