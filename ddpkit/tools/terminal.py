"""Read flags and write for terminals: aligned columns, colours where they are wanted, progress on stderr."""

from __future__ import annotations

import argparse
import math
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

_COLOURS = {"red": 31, "green": 32, "yellow": 33, "bold": 1, "dim": 2}
_WIDEST = 120  # columns


def paint(text: str, colour: str) -> str:
    """Colour a text for stdout, unless that is no terminal or colours are not wanted.

    Args:
        text: The text.
        colour: "red", "green", "yellow", "bold" or "dim".
    """
    is_terminal = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    unwanted = os.environ.get("NO_COLOR") or not is_terminal
    if unwanted or not text:
        return text
    return f"\033[{_COLOURS[colour]}m{text}\033[0m"


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    r"""Lay out a table, none without rows; numbers, and figures with a unit, are aligned to the right.

    >>> print("\n".join(table(["rank", "host"], [[0, "node1"], [10, "node2"]])))
    rank  host
       0  node1
      10  node2
    """
    if not rows:
        return []
    columns = []
    for number, name in enumerate(header):
        cells = [str(row[number]) for row in rows]
        are_figures = all(cell.lstrip("-")[:1].isdigit() for cell in cells)
        width = max(map(len, [name, *cells]))
        aligned = str.rjust if are_figures else str.ljust
        columns.append([aligned(cell, width) for cell in [name, *cells]])
    return ["  ".join(cells).rstrip() for cells in zip(*columns, strict=True)]


def wrap(texts: Sequence[str], margin: int) -> list[str]:
    """Break texts into lines that fit into the terminal beside a margin of so many columns."""
    width = max(columns() - margin, 40)
    lines = []
    for text in texts:
        lines += textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False) or [""]
    return lines


def columns() -> int:
    """Return how many columns a report may take: of the terminal, else 100."""
    return min(shutil.get_terminal_size((100, 24)).columns, _WIDEST)


def count(number: int, noun: str) -> str:
    """Write a number with its noun, in the plural unless it is one.

    >>> count(1, "rank"), count(2, "rank")
    ('1 rank', '2 ranks')
    """
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun}s"


def announce(step: str) -> None:
    """Tell the person which step begins now, on stderr."""
    print(f"{step} ...", file=sys.stderr, flush=True)


def positive(text: str) -> int:
    """Read a flag that is a positive number."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def checked_by(check: Callable[[str], object]) -> Callable[[str], str]:
    """Make a type of flags from a check that raises ValueError."""

    def convert(text: str) -> str:
        try:
            check(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        return text

    return convert


def positive_seconds(text: str) -> float:
    """Read a flag that is a positive, finite number of seconds."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of seconds")
    return seconds
