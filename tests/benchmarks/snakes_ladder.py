"""Plays every pair of scripted snakes players on both sides and writes a Markdown table of who wins.

    PYTHONPATH=examples/snakes_ddpg python tests/benchmarks/snakes_ladder.py --games 2000

A cell is the share of games that the player of its row wins against the player of its column; what is missing to 1 in
a cell and its mirror image are draws. Exits with an error unless each difficulty beats every lower one, and wins more
often against the public greedy than the one before.
"""

import argparse
import sys

from snakes.evaluation import play_games
from snakes.opponents import LEVELS, OPPONENTS
from tqdm import tqdm


def main(games: int, seed: int) -> None:
    names = list(OPPONENTS)
    pairs = [(one, other) for i, one in enumerate(names) for other in names[i:]]
    rates, results = {}, {}
    for one, other in tqdm(pairs, disable=None):
        result = play_games(OPPONENTS[one], OPPONENTS[other], games, seed=seed)
        results[one, other], rates[one, other] = result, result.win_rate
        if one != other:
            rates[other, one] = result.losses / result.games

    print("| | level | " + " | ".join(names) + " |")
    print("|---" * (len(names) + 2) + "|")
    for one in names:
        level = LEVELS.index(one) if one in LEVELS else ""
        print(f"| {one} | {level} | " + " | ".join(f"{rates[one, other]:.3f}" for other in names) + " |")
    error = (0.25 / games) ** 0.5
    print(f"\n{games} games a pair, both sides, seed {seed}; standard error of a cell at most {error:.3f}\n")
    for (one, other), result in results.items():
        print(f"- {one} against {other}: {result}")
    sys.exit(_not_monotone(rates))


def _not_monotone(rates: dict[tuple[str, str], float]) -> str | None:
    for high in range(len(LEVELS)):
        for low in range(high):
            if rates[LEVELS[high], LEVELS[low]] <= rates[LEVELS[low], LEVELS[high]]:
                return f"level {high} does not beat level {low}"
        if high and rates[LEVELS[high], "greedy"] <= rates[LEVELS[high - 1], "greedy"]:
            return f"level {high} is no stronger against greedy than level {high - 1}"
    return None


if __name__ == "__main__":
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--games", type=int, default=1000, help="games of each pair, half of them on each side")
    parser.add_argument("--seed", type=int, default=0, help="of all games")
    main(**vars(parser.parse_args()))
