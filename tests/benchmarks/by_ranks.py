"""Compare how fast a program works on different numbers of ranks, in runs that take turns."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable


def compare(
    about: str, unit: str, rate: Callable[[int, argparse.Namespace], float], parser: argparse.ArgumentParser
) -> None:
    """Print a Markdown table of medians, the speed-ups being those within a round.

    Args:
        about: The benchmark's own text.
        unit: What the rate counts, per second.
        rate: Measures one run, given a number of ranks and the arguments.
        parser: With the benchmark's own arguments; the common ones are added.
    """
    parser.description, parser.formatter_class = about, argparse.RawDescriptionHelpFormatter
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="numbers of ranks to compare")
    parser.add_argument("--rounds", type=int, default=5, help="runs on each number of ranks")
    args = parser.parse_args()
    rates: dict[int, list[float]] = {ranks: [] for ranks in args.ranks}
    for number in range(args.rounds):
        for ranks, found in rates.items():
            found.append(rate(ranks, args))
            print(f"round {number + 1} of {args.rounds}, ranks {ranks}: {found[-1]:.1f}", file=sys.stderr, flush=True)
    first = args.ranks[0]
    print(f"| ranks | {unit} | × {first} rank |\n|---|---|---|")
    for ranks, found in rates.items():
        speed_up = statistics.median(one / base for one, base in zip(found, rates[first], strict=True))
        print(f"| {ranks} | {statistics.median(found):.1f} | {speed_up:.2f} |")
